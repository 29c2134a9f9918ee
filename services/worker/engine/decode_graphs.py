"""CUDA graphs of steps that are decodes alone: what a layer launches is recorded once for each number of rows, and
launched by one call from then on.

The layer is the least that is ever dropped: whatever range of layers a stage has, its graphs are there. Parameters and
KV keep their addresses over drops and restores, and all else that a graph reads lies where it lay when it was recorded,
so nothing is recorded anew. Steps with chunks, or of too many parts of contexts, run as ever.

The ranks of an instance record in lockstep, and sums over them are part of what a layer launches. What is replayed
follows from a step's layout alone, which is the same for all.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Protocol

import torch

from ballast.common.errors import ConfigError
from services.worker.engine.attention_cuda import CudaAttention, CudaAttentionStep
from services.worker.engine.implementation import StageModel
from services.worker.engine.packing import PackedStep

_MOST_ROWS = 256
_TILES_PER_ROW, _LEAST_TILES = 4, 64  # programs without work cost little, but not nothing


class Record(Protocol):
    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Runs it, records what it launches, and gives what launches all of that again, at the same addresses."""
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
        torch.cuda.synchronize(self._device)
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
    """The recordings of all layers. Made while all layers are there."""

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
        self._buckets = sorted({*(1 << i for i in range(rows.bit_length())), rows})
        self._attention = attention
        self._step = attention.blank(rows, _tiles(rows), longest, block_tokens)
        device = self._step.k_rows_T.device
        self._positions_T = torch.zeros(rows, dtype=torch.int64, device=device)
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}
        with torch.inference_mode():
            self._hidden_TD = model.embed(self._positions_T, self._positions_T)
            model.reserve(max(tokens, rows))  # the buffers are part of the recordings: they may not grow afterwards
            for layer, bucket in itertools.product(range(model.layer_count), reversed(self._buckets)):
                attend = self._step.first(bucket, _tiles(bucket))
                launch = functools.partial(self._run_layer, model, attend, layer, bucket)
                try:
                    self._replays[layer, bucket] = record(launch)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    why = f"has to be set here: layer {layer} with {bucket} rows cannot be recorded: {error}"
                    raise ConfigError("enforce_eager", why) from error

    def _run_layer(self, model: StageModel, attend: CudaAttentionStep, layer: int, rows: int) -> None:
        hidden_TD, positions_T = self._hidden_TD[:rows], self._positions_T[:rows]
        model.run_layers(hidden_TD, positions_T, attend, first_layer=layer, last_layer=layer + 1)

    def run_layers(
        self, hidden_TD: torch.Tensor, positions_T: torch.Tensor, step: PackedStep, layers: range
    ) -> torch.Tensor | None:
        """As of the model, in fresh memory. None: such a step was not recorded."""
        rows = step.row_count
        if step.chunks or rows > self._buckets[-1]:
            return None
        bucket = next(bucket for bucket in self._buckets if rows <= bucket)
        if not self._attention.fill(self._step.first(bucket, _tiles(bucket)), step):
            return None
        self._hidden_TD[:rows].copy_(hidden_TD)
        self._positions_T[:rows].copy_(positions_T)
        for layer in layers:
            self._replays[layer, bucket]()
        return self._hidden_TD[:rows].clone()


def _tiles(rows: int) -> int:
    return max(_LEAST_TILES, rows * _TILES_PER_ROW)
