"""An engine in virtual time. Execution, checksums and loading take the time given by a cost model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple, cast

from ballast.common.errors import InvariantViolation
from ballast.common.ids import WorkerId
from services.worker.core.batch import Batch, Slice, StepResult
from services.worker.core.events import BlockCopy
from services.worker.emulation.copier import HostMarks, copy_marks, one_way
from services.worker.emulation.phantom import phantom
from services.worker.emulation.runner import WEIGHTS, Marks, layer_mark
from services.worker.pipeline.background import never
from sim.clock import Clock
from sim.cost import BatchCost, ExecutionModel
from sim.flight import Flight, flight_of
from sim.memory import SimMemory
from sim.network import Bulk, Network

if TYPE_CHECKING:
    import torch

_NO_TEXTS: dict[int, tuple[str, ...]] = {}
_NO_LOGPROBS: dict[int, tuple[None, ...]] = {}
_Given = TypeVarTuple("_Given")
_Result = TypeVar("_Result")


def disk_of(worker_id: WorkerId) -> str:
    """Network name of the disk from which an instance loads the checkpoint."""
    return f"disk of {worker_id}"


def no_texts(count: int) -> tuple[str, ...]:
    if count not in _NO_TEXTS:
        _NO_TEXTS[count] = ("",) * count
    return _NO_TEXTS[count]


def result_of(batch: Batch, execute_s: float = 0.0, copy_s: float = 0.0) -> StepResult:
    """Results of a step. A token's id is its position, so that clients detect gaps."""
    token_ids = tuple([first + len(ids) for _, first, ids, samples in batch.slices if samples])
    count = len(token_ids)
    if count not in _NO_LOGPROBS:
        _NO_LOGPROBS[count] = (None,) * count
    return StepResult(batch.step_id, token_ids, _NO_LOGPROBS[count], execute_s, copy_s=copy_s)


class Busy(Protocol):
    """Tracks the time for which an engine is busy."""

    def begin(self, work: BatchCost, token_count: int, layer_count: int, *, is_last: bool = True) -> float:
        """Begin a batch in `layer_count` layers and return its duration in seconds, including sampling if `is_last`."""
        ...

    def spend(self, seconds: float) -> None:
        """Keep the engine busy for a duration."""
        ...


class SimEngine:
    """A `StageEngine` in virtual time."""

    def __init__(
        self, busy: Busy, execution: ExecutionModel, layer_count: int, token_bytes: int, marks: Marks | None = None
    ) -> None:
        """`token_bytes`: size of a token's activations. `marks`: to detect reads of wrong KV or layers; None: no
        detection.
        """
        self._busy = busy
        self._execution = execution
        self._layer_count = layer_count
        self._token_bytes = token_bytes
        self._marks = marks

    def run_stage(
        self,
        batch: Batch,
        block_tables: Sequence[Sequence[int]],
        hidden_TD: torch.Tensor | None,
        *,
        first_layer: int,
        last_layer: int,
        preempted: Callable[[], bool] = never,
    ) -> StepResult | torch.Tensor:
        """Execute a stage. It is instantaneous here, so `preempted` is never called."""
        if self._marks is not None:
            self._look(self._marks, batch, block_tables, range(first_layer, last_layer))
        if not batch.slices:
            return StepResult(batch.step_id, (), (), 0.0)
        flight = cast("Flight | None", hidden_TD)
        if flight is None:
            flight = flight_of(batch, self._execution.work(batch), token_bytes=self._token_bytes)
        is_last, token_count = last_layer == self._layer_count, sum([part.samples for part in batch.slices])
        seconds = self._busy.begin(flight.work, token_count, last_layer - first_layer, is_last=is_last)
        self._busy.spend(seconds)
        if not is_last:
            return cast("torch.Tensor", flight)
        return result_of(batch, seconds)

    @staticmethod
    def _look(marks: Marks, batch: Batch, tables: Sequence[Sequence[int]], layers: range) -> None:
        marks.take_in(batch)
        if not batch.slices:
            return
        wrong = marks.compute(batch, tables, bytes(len(batch.slices)), layers)
        if any(wrong):
            part = next(part for part, is_wrong in zip(batch.slices, wrong, strict=True) if is_wrong)
            what = f"sequence {part.sequence_id} reads KV or layers that are not its own, from {part.first_position} on"
            raise InvariantViolation(what)

    def slot_count(self, hidden_TD: object) -> int:
        """See `ActivationStore.slot_count`: unlimited, because nothing is stored."""
        return sys.maxsize

    def write(self, hidden_TD: object, rows: Sequence[int], slots: Sequence[int]) -> None: ...

    def read(self, slots: Sequence[int]) -> torch.Tensor:
        part = Slice(0, 0, (0,) * len(slots), samples=False)
        batch = Batch(0, (), (), (part,))
        return cast("torch.Tensor", flight_of(batch, self._execution.work(batch), token_bytes=self._token_bytes))

    def forget_all(self) -> None:
        if self._marks is not None:
            self._marks.forget_all()


class SimCopier:
    """A `BlockCopier` that runs concurrently with the engine, in both directions at once. Also copies marks."""

    def __init__(
        self, memory: SimMemory | None, block_s: float, now: Callable[[], float], busy: Callable[[float], None]
    ) -> None:
        """`memory`: contains marks; None: no marks. `block_s`: time for a block's KV of one layer in one direction.
        `busy` is called with the time for which the engine waits.
        """
        self._memory = memory
        self._block_s = block_s
        self._now = now
        self._busy = busy
        self._host: HostMarks = {}
        self._began_s = self._took_s = 0.0

    def copy(self, copies: Sequence[BlockCopy], layers: Sequence[int]) -> float:
        """Copy blocks. Returns the duration."""
        if self._memory is not None:
            for copy in copies:
                for layer in layers:
                    copy_marks(copy, layer, phantom(self._memory.kv.layer(layer)).area, self._host)
        return one_way(copies, len(layers)) * self._block_s

    def start(self, copies: Sequence[BlockCopy], layers: Sequence[int]) -> None:
        self._began_s, self._took_s = self._now(), self.copy(copies, layers)

    def finish(self) -> float:
        self._busy(max(0.0, self._began_s + self._took_s - self._now()))
        return self._took_s

    def close(self) -> None:
        """No-op."""


class SimBackground:
    """Virtual-time version of `services.worker.pipeline.context.Background`. Initial checksums take no time."""

    def __init__(
        self,
        me: WorkerId,
        memory: SimMemory,
        clock: Clock,
        network: Network,
        checksum_bytes_per_s: float,
        host_bytes_per_s: float,
    ) -> None:
        """`checksum_bytes_per_s`: 0: instantaneous. `host_bytes_per_s`: speed of copies to and from host memory."""
        self._host_bytes_per_s = host_bytes_per_s
        self._host_free_at_s = 0.0
        self._kept: set[int] = set()  # layers in host memory
        self._me = me
        self._memory = memory
        self._clock = clock
        self._network = network
        self._checksum_bytes_per_s = checksum_bytes_per_s
        self._label = f"{me} beside".encode()

    def submit(self, job: Callable[[*_Given], _Result], /, *given: *_Given) -> Future[_Result]:
        """Start a job. It ends once all the bytes that it needs have been read."""
        done: Future[_Result] = Future()
        done.set_running_or_notify_cancel()
        read_bytes = self._memory.read_bytes
        result = job(*given)
        took_s = 0.0
        if self._clock.now_s and self._checksum_bytes_per_s:
            took_s = (self._memory.read_bytes - read_bytes) / self._checksum_bytes_per_s
        if took_s:
            self._clock.after(took_s, self._label, lambda: done.set_result(result))
        else:
            done.set_result(result)
        return done

    def holds(self, layer: int) -> bool:
        return layer in self._kept

    def fill(self, layer: int) -> Future[bool]:
        done: Future[bool] = Future()
        done.set_running_or_notify_cancel()
        kept = self.holds(layer)

        def came() -> None:
            phantom(weights).write([layer_mark(layer)])
            done.set_result(kept)

        weights = self._memory.parameters.layer(layer)[WEIGHTS]
        if kept:
            self._copy(weights.nbytes, came)
            return done
        self._network.transfer(disk_of(self._me), self._me, weights.nbytes, Bulk.PARAMETERS, came)
        return done

    def keep(self, layer: int) -> Future[None]:
        """Copy a layer to host memory, only once, because parameters never change."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        if layer in self._kept:
            done.set_result(None)
        else:
            self._kept.add(layer)
            self._copy(self._memory.parameters.layer(layer)[WEIGHTS].nbytes, lambda: done.set_result(None))
        return done

    def _copy(self, size_bytes: int, done: Callable[[], None]) -> None:
        """Copy bytes; copies run one after the other."""
        self._host_free_at_s = max(self._clock.now_s, self._host_free_at_s) + size_bytes / self._host_bytes_per_s
        self._clock.at(self._host_free_at_s, self._label, done)

    def rest(self, stopped: Callable[[], bool], hurried: Callable[[], bool] = never) -> None:
        """No-op: jobs without urgency take no time here."""

    def shutdown(self) -> None:
        """No-op."""
