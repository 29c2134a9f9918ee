"""An instance that nobody needs for now: its parameters go to host memory, and its device memory is given back.

It parks only where nothing is here that could be lost: alone, with no request, no transition and no migration. From
the first step on it leads no group, so that whatever still comes is refused and placed elsewhere. Waking is what a
member of a lost group does too: all layers come, then a new group of one is opened. Engine thread only, but `parks`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum, auto

from ballast.common.errors import ConfigError
from ballast.service.logs import get_logger
from services.worker.core.events import RoleChanged
from services.worker.core.report import Parks
from services.worker.memory.device import DeviceMemory
from services.worker.pipeline.context import Background, MemberContext
from services.worker.pipeline.events import ParkOrdered, Woken
from services.worker.pipeline.layers import LayerLoading
from services.worker.pipeline.progress import Progress

_MEASURED = 5  # wakings, of which the slowest counts
_HOST_BYTES_PER_S = 10e9  # before the first: from host memory that is not locked


class _State(Enum):
    SERVING = auto()
    SAVING = auto()  # layers are copied to host memory
    PARKED = auto()
    WAKING = auto()


class Parking:
    def __init__(
        self,
        context: MemberContext,
        background: Background,
        layer_loading: LayerLoading,
        why_not: Callable[[], str],
        serve: Callable[[], None],
    ) -> None:
        """`why_not` says what is in the way of parking, or nothing. `serve` makes this worker one of its own again; all
        layers are here.
        """
        self._context = context
        self._memory: DeviceMemory = context.memory
        self._background = background
        self._layer_loading = layer_loading
        self._why_not = why_not
        self._serve = serve
        self._now = context.now
        self._state = _State.SERVING
        self._jobs: list[Future[None]] = []
        self._stays = False  # while layers are saved: it is to be woken as soon as it is parked
        self._began_s = 0.0
        self._took_s = deque[float](maxlen=_MEASURED)
        self.parks = Parks(wake_s=self._estimate_s())  # replaced, never changed: others read it

    def _estimate_s(self) -> float:
        """0: it cannot be parked."""
        parameters = self._memory.parameters
        layer_bytes = self._memory.parameter_bytes_of(range(parameters.layer_count))
        return layer_bytes / _HOST_BYTES_PER_S if self._memory.can_park else 0.0

    @property
    def under_way(self) -> bool:
        """It is parked, or on its way there or back."""
        return self._state is not _State.SERVING

    @property
    def at_rest(self) -> bool:
        return self._state in (_State.SERVING, _State.PARKED)

    def ordered(self, event: ParkOrdered) -> None:
        """Orders are repeated until what they want is so."""
        match self._state:
            case _State.SERVING if event.park:
                self._park()
            case _State.SAVING:
                self._stays = not event.park
            case _State.PARKED if not event.park:
                self._wake()
            case _:
                pass

    def _park(self) -> None:
        if why := self._why_not():
            get_logger().debug("not parked yet", why=why)
            return
        self._state, self._stays, self.parks = _State.SAVING, False, self.parks._replace(parked=True)
        self._context.answers.tell(RoleChanged(self._now(), leads=False))
        self._layer_loading.server.cancel()
        self._jobs = [self._background.keep(layer) for layer in range(self._context.role.layer_count)]
        for job in self._jobs:
            job.add_done_callback(lambda _: self._context.post(Woken()))

    def poll(self) -> None:
        if self._state is _State.SAVING and all(job.done() for job in self._jobs):
            self._saved()
        if self._state is _State.WAKING:
            self._look_at_layers()

    def _saved(self) -> None:
        for job in self._jobs:
            job.result()  # raises what went wrong: host memory, say
        if not self._layer_loading.server.idle:
            return
        self._jobs = []
        self._layer_loading.shrink(0)
        self._memory.park()
        self._state = _State.PARKED
        get_logger().info("parked", given_back_bytes=self._memory.report().free_bytes)
        if self._stays:
            self._wake()

    def _wake(self) -> None:
        self._began_s, role = self._now(), self._context.role
        try:
            self._memory.unpark()
        except ConfigError as error:  # another process has it; the next order tries again
            get_logger().warning("not woken: the device's memory is not to be had", why=str(error))
            return
        self._state = _State.WAKING
        epoch = max(role.epoch, self._context.published.newest_epoch)
        progress = Progress(epoch=epoch, began_s=self._began_s, block_count_before=0)
        self._layer_loading.load(epoch, {}, progress, 0, own=True)

    def _look_at_layers(self) -> None:
        if not self._layer_loading.all_here():
            return
        self._layer_loading.end()
        self._serve()
        self._took_s.append(self._now() - self._began_s)
        self._state, self.parks = _State.SERVING, Parks(wake_s=max(self._took_s))
        get_logger().info("woken", seconds=round(self._took_s[-1], 3))
