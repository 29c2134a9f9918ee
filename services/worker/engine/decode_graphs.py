"""CUDA graphs of steps that are decodes alone: what all layers of a stage launch is recorded once for some numbers of
rows, and launched by one call from then on, whatever the contexts are.

Parameters and KV keep their addresses over drops and restores, and all else that a graph reads lies where it lay when
it was recorded, so what was recorded stays good: a range of layers is recorded when it is first executed, and never
anew. Steps with chunks run as ever.

The ranks of an instance record in lockstep, and sums over them are part of what a layer launches. What is replayed
follows from a step's layout alone, which is the same for all.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Protocol

import torch

from ballast.common.errors import ConfigError
from services.worker.engine.attention_cuda import CudaAttention, CudaAttentionStep, StagedDecodes
from services.worker.engine.implementation import StageModel
from services.worker.engine.packing import PackedStep

_MOST_ROWS = 512
_MOST_RANGES = 4  # beside all layers: each recording takes some MiB of the device


class Record(Protocol):
    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Runs it once, records what it launches, and gives what launches all of that again, at the same addresses."""
        ...


class CudaRecord:
    """On the stream that the engine computes on. All recordings share one pool of memory: they never run at the same
    time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        launch()  # kernels compile and libraries choose now, since they may not while it is recorded
        torch.cuda.current_stream(self._device).synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            launch()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # or nothing could be launched on this stream any more
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay


def recorder(device: torch.device) -> Record | None:
    """None: nothing can be recorded there."""
    return CudaRecord(device) if device.type == "cuda" else None


class DecodeGraphs:
    """The recordings of ranges of layers. That of all layers is made at once; that of another range, which a drop
    brings, when it is first executed.
    """

    def __init__(
        self,
        model: StageModel,
        attention: CudaAttention,
        record: Record,
        *,
        tokens: int,
        sequences: int,
        longest: int,
        block_tokens: int,
    ) -> None:
        """`tokens` of the largest step, `sequences` of the largest of decodes alone, `longest` of the contexts.

        Raises:
            ConfigError: the device does not record them.
        """
        rows = min(sequences, _MOST_ROWS)
        self._sizes = recorded_sizes(rows)
        self._model, self._record = model, record
        self._staged = StagedDecodes(attention, rows, longest, block_tokens)
        self._whole = range(model.layer_count)
        self._replays: dict[range, dict[int, Callable[[], None]]] = {}
        with torch.inference_mode():
            self._hidden_TD = model.embed(self._staged.token_ids_T[:rows], self._staged.positions_T[:rows])
            model.reserve(max(tokens, rows))  # the buffers are part of the recordings: they may not grow afterwards
            for size in reversed(self._sizes):
                try:
                    self._run(self._whole, size, base_block=0)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    why = f"has to be set here: all layers with {size} rows cannot be recorded: {error}"
                    raise ConfigError("enforce_eager", why) from error

    def run_layers(self, hidden_TD: torch.Tensor | None, step: PackedStep, layers: range) -> torch.Tensor | None:
        """As of the model, from the step's tokens on if the first layer is among them. The result lies where that of
        the next step will, unless it is what another stage is given. None: such a step is not recorded.
        """
        rows = step.row_count
        if step.chunks or rows > self._sizes[-1] or not self._staged.fill(step):
            return None
        if hidden_TD is not None:
            self._hidden_TD[:rows].copy_(hidden_TD)
        self._run(layers, next(size for size in self._sizes if rows <= size), step.base_block)
        result_TD = self._hidden_TD[:rows]
        return result_TD if layers.stop == self._whole.stop else result_TD.clone()

    def _run(self, layers: range, rows: int, base_block: int) -> None:
        """By its recording, which is made where there is none, with the address of a block that is there now."""
        if layers not in self._replays:
            others = [known for known in self._replays if known != self._whole]
            if len(others) >= _MOST_RANGES:
                del self._replays[others[0]]  # the oldest
            self._replays[layers] = {}
        replays = self._replays[layers]
        if rows in replays:
            replays[rows]()
        else:
            replays[rows] = self._record(
                functools.partial(self._launch, self._staged.first(rows, base_block), layers, rows)
            )

    def _launch(self, attend: CudaAttentionStep, layers: range, rows: int) -> None:
        hidden_TD, positions_T, model = self._hidden_TD[:rows], self._staged.positions_T[:rows], self._model
        if layers.start == 0:
            hidden_TD.copy_(model.embed(self._staged.token_ids_T[:rows], positions_T))
        result_TD = model.run_layers(hidden_TD, positions_T, attend, first_layer=layers.start, last_layer=layers.stop)
        if result_TD.data_ptr() != hidden_TD.data_ptr():
            hidden_TD.copy_(result_TD)


def recorded_sizes(rows: int) -> list[int]:
    """Numbers of rows for which steps are recorded; others have some rows more that do nothing."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, *range(128, 257, 32), *range(320, _MOST_ROWS + 1, 64)]
    return [*(size for size in sizes if size < rows), rows]
