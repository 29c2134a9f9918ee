"""A member of the group is gone: what is left of it becomes a whole worker of its own again.

Its requests have ended without a word, and dispatchers replay them. First everything that reads or writes this
worker's memory must have ended, then the KV goes, and the missing layers come from the checkpoint, on the layers'
threads. Engine thread only; `poll` never waits.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch
from ballast.common.transition import Phase
from services.worker.core.phases import deadline_s
from services.worker.pipeline.layer_loading import LayerLoading
from services.worker.pipeline.status import Progress


@dataclass(slots=True)
class Rescue:
    epoch: Epoch  # that is reported as failed, and as done when this worker is whole
    progress: Progress
    layer_loading: LayerLoading
    quiet: Callable[[], bool]  # nothing is sent from the KV or written into it
    kept: range  # layers that this worker executes
    began_s: float
    under_way: bool = False

    def poll(self, now_s: float, grow: Callable[[int], None]) -> bool:
        """True once all layers are here. `grow` is told how many blocks there are."""
        if not self.under_way:
            block_count = self.layer_loading.undo(self.kept) if self.quiet() else None
            if block_count is None:
                limit_s = deadline_s(Phase.FAILED)
                if now_s - self.began_s > limit_s:
                    raise InvariantViolation(f"transfers have not ended {limit_s:g} s after their links")
                return False
            grow(block_count)
            self.under_way = True
            self.layer_loading.load(self.epoch, {}, self.progress, 0)
        if self.layer_loading.failure:
            raise InvariantViolation(f"a layer cannot be read from the checkpoint: {self.layer_loading.failure}")
        return self.layer_loading.complete
