"""CUDA graphs of decode-only steps: all launches of a range of layers are recorded once for selected numbers of rows
and replayed by a single call, for contexts of any length.

Parameters and KV keep their addresses through drops and restores, and so does everything else that a graph reads, so
graphs stay valid: a range of layers is recorded when it is first executed and never again. Steps with chunks run
without graphs.

The ranks of an instance record in lockstep, and their all-reduces are part of the graphs. Which graph is replayed
depends on the step's layout only, which is the same on all ranks.
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
_MOST_RANGES = 4  # in addition to all layers; limited because a recording takes some MiB of device memory
_UNUSED_CALLS = 1000  # calls after which a range may be replaced; others run without graphs until then


class Record(Protocol):
    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Run `launch` once, record its launches, and return a function that replays them at the same addresses."""
        ...


class CudaRecord:
    """Records CUDA graphs on the engine's stream. All graphs share one memory pool, as they never run concurrently."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        launch()  # triggers compilation and library autotuning, which are not allowed during capture
        torch.cuda.current_stream(self._device).synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the device during the capture.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            launch()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # otherwise the stream would stay in capture mode
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay


def recorder(device: torch.device) -> Record | None:
    """The recorder for a device; None if it supports no graphs."""
    return CudaRecord(device) if device.type == "cuda" else None


class DecodeGraphs:
    """CUDA graphs of ranges of layers. All layers are recorded at startup; another range, after a drop, when it is
    first executed.
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
        """`tokens`: maximum tokens of a step; `sequences`: maximum rows of a decode-only step; `longest`: longest
        context.

        Raises:
            ConfigError: the device cannot record the graphs.
        """
        rows = min(sequences, _MOST_ROWS)
        self._sizes = recorded_sizes(rows)
        self._model, self._record = model, record
        self._staged = StagedDecodes(attention, rows, longest, block_tokens)
        self._whole = range(model.layer_count)
        self._replays: dict[range, dict[int, Callable[[], None]]] = {self._whole: {}}
        self._calls = 0
        self._called: dict[range, int] = {}  # ranges other than all layers, by their last calls
        with torch.inference_mode():
            self._hidden_TD = model.embed(self._staged.token_ids_T[:rows], self._staged.positions_T[:rows])
            model.reserve(max(tokens, rows))  # graphs contain the buffers' addresses
            for size in reversed(self._sizes):
                try:
                    self._run(self._whole, size, base_block=0)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    why = f"has to be set here: all layers with {size} rows cannot be recorded: {error}"
                    raise ConfigError("enforce_eager", why) from error

    def run_layers(self, hidden_TD: torch.Tensor | None, step: PackedStep, layers: range) -> torch.Tensor | None:
        """Run the layers as the model does, including the embedding if the first layer is among them. Returns None
        without running anything if no graph fits the step. The result of the last layer is overwritten by the next
        step.
        """
        rows = step.row_count
        if step.chunks or rows > self._sizes[-1] or not self._has_room(layers) or not self._staged.fill(step):
            return None
        if hidden_TD is not None:
            self._hidden_TD[:rows].copy_(hidden_TD)
        self._run(layers, next(size for size in self._sizes if rows <= size), step.base_block)
        result_TD = self._hidden_TD[:rows]
        return result_TD if layers.stop == self._whole.stop else result_TD.clone()

    def _has_room(self, layers: range) -> bool:
        """True if the range has graphs or may get some, in place of those of a range that is not in use any more.
        Safepoints divide batches into many ranges.
        """
        self._calls += 1
        if layers != self._whole:
            if layers not in self._called and len(self._called) >= _MOST_RANGES:
                oldest = next(iter(self._called))
                if self._calls - self._called[oldest] <= _UNUSED_CALLS:
                    return False
                del self._called[oldest], self._replays[oldest]
            self._called.pop(layers, None)
            self._called[layers] = self._calls
            self._replays.setdefault(layers, {})
        return True

    def _run(self, layers: range, rows: int, base_block: int) -> None:
        """Replay the graph for this range and number of rows; record it first if it does not exist. `base_block` must
        be mapped.
        """
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
    """Numbers of rows, up to `rows`, for which graphs are recorded; other steps are padded to the next one."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, *range(128, 257, 32), *range(320, _MOST_ROWS + 1, 64)]
    return [*(size for size in sizes if size < rows), rows]
