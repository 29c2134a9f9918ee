"""The activation log of a stage, and how a stand-in computes KV from it.

A stage logs in host memory the activations that it sends to the next stage. If that stage is lost, a stand-in computes
the KV of the lost layers from this log, without the other stages. Used by the engine thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ballast.common.ids import Epoch, WorkerId
from ballast.common.sampling import SamplingParams
from ballastpb.worker.v1 import stage_pb2 as pb
from services.worker.core.batch import Batch, NewSequence, SequenceId, Slice, StepResult
from services.worker.core.blocks import BlockBook
from services.worker.core.logged import LoggedTokens
from services.worker.core.plan import Victim
from services.worker.core.transition_messages import KvReceived
from services.worker.links.traffic import TrafficClass
from services.worker.pipeline.context import ActivationStore, MemberContext, StageEngine
from services.worker.pipeline.events import ActivationsArrived, ActivationsAsked
from services.worker.pipeline.wire import Topic

if TYPE_CHECKING:
    import torch


class HostActivations:
    """An `ActivationStore` whose address range is reserved with the first batch in a pipeline. Its pages are allocated
    when first written.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._slots_SD: torch.Tensor | None = None

    def slot_count(self, hidden_TD: torch.Tensor) -> int:
        if self._slots_SD is None:
            width = hidden_TD.shape[1]
            count = self._size_bytes // (width * hidden_TD.itemsize)
            self._slots_SD = hidden_TD.new_empty((count, width), device="cpu")
        return self._slots_SD.shape[0]

    def write(self, hidden_TD: torch.Tensor, rows: Sequence[int], slots: Sequence[int]) -> None:
        on_host_TD = hidden_TD.to("cpu")
        if len(rows) < len(on_host_TD):
            on_host_TD = on_host_TD[list(rows)]
        assert self._slots_SD is not None
        self._slots_SD[list(slots)] = on_host_TD

    def read(self, slots: Sequence[int]) -> torch.Tensor:
        assert self._slots_SD is not None
        return self._slots_SD[list(slots)]


class ActivationLog:
    def __init__(self, store: ActivationStore, block_tokens: int) -> None:
        self._store = store
        self.tokens = LoggedTokens(block_tokens)

    def take(self, batch: Batch, tables: Sequence[Sequence[int]], hidden_TD: torch.Tensor) -> None:
        """Log the activations that the next stage gets for a batch that has run here: `hidden_TD`,
        one row per token.
        """
        rows, slots = self.tokens.take(batch, tables, self._store.slot_count(hidden_TD))
        if rows:
            self._store.write(hidden_TD, rows, slots)

    def read(
        self, book: BlockBook, sequence_id: SequenceId, first: int, count: int
    ) -> tuple[tuple[int, ...], torch.Tensor] | None:
        """Return token ids and activations of a sequence's positions `[first, first + count)`; None: not all are
        logged.
        """
        if not self.tokens.covers(book, sequence_id, first + count):
            return None
        slots = self.tokens.slots(book.table(sequence_id), first, count)
        return self.tokens.token_ids(slots), self._store.read(slots)


@dataclass(slots=True)
class _RefilledSequence:
    epoch: Epoch
    giver: WorkerId
    victim: Victim
    computed_tokens: int = 0  # tokens whose KV was computed here


class Refill:
    """Sends activations of this stage's log, and computes KV from another stage's log, chunk by chunk."""

    def __init__(
        self, context: MemberContext, engine: StageEngine, log: ActivationLog | None, chunk_tokens: int
    ) -> None:
        self._context = context
        self._engine = engine
        self._log = log
        self._chunk_tokens = chunk_tokens
        self._jobs: deque[_RefilledSequence] = deque()

    @property
    def logged(self) -> LoggedTokens | None:
        """The logged tokens of this stage; None: there is no log."""
        return None if self._log is None else self._log.tokens

    def forget(self) -> None:
        self._jobs.clear()

    def begin(self, epoch: Epoch, victim: Victim, giver: WorkerId) -> None:
        """Begin to compute a sequence's KV from the log of `giver`. Its blocks are already reserved."""
        self._jobs.append(_RefilledSequence(epoch, giver, victim))
        if len(self._jobs) == 1:
            self._ask()

    def _ask(self) -> None:
        job = self._jobs[0]
        first = job.computed_tokens
        count = min(self._chunk_tokens, job.victim.computed_tokens - first)
        body = pb.Activations(sequence_id=job.victim.sequence_id, first=first, count=count).SerializeToString()
        links = self._context.links
        links.send(job.giver, TrafficClass.CONTROL, Topic.ACTIVATIONS_WANTED, body, epoch=job.epoch)

    def asked(self, event: ActivationsAsked) -> None:
        links, log = self._context.links, self._log
        found = log.read(self._context.book, event.sequence_id, event.first, event.count) if log is not None else None
        if found is None:
            if (link := links.to(event.peer, event.epoch)) is not None:
                link.give_up(f"the activations of {event.sequence_id} are no longer logged")
            return
        token_ids, hidden_TD = found
        given = pb.Activations(sequence_id=event.sequence_id, first=event.first, token_ids=token_ids)
        to, traffic, head = event.peer, TrafficClass.ACTIVATION, given.SerializeToString()
        links.send(to, traffic, Topic.BATCH_HEAD, head, epoch=event.epoch)
        links.send(to, traffic, Topic.ACTIVATIONS, b"", hidden_TD, epoch=event.epoch)

    def arrived(self, event: ActivationsArrived) -> KvReceived | None:
        """Compute KV from activations. Returns the event for the transition once the sequence is complete."""
        job = self._jobs[0] if self._jobs else None
        if job is None or (event.epoch, event.sequence_id, event.first) != (
            job.epoch,
            job.victim.sequence_id,
            job.computed_tokens,
        ):
            self._context.published.stale_total += 1
            return None
        self._compute(event)
        job.computed_tokens += len(event.token_ids)
        self._context.published.counted.refilled_tokens += len(event.token_ids)
        done = job.computed_tokens >= job.victim.computed_tokens
        if done:
            self._jobs.popleft()
            self._run(Batch(0, (event.sequence_id,), (), ()), (), None)  # its leader adds it anew
        if self._jobs:
            self._ask()
        return KvReceived(self._context.now(), job.epoch, event.sequence_id, job.giver) if done else None

    def _compute(self, event: ActivationsArrived) -> None:
        """Write the KV of these tokens in this stage's layers, and log its own activations."""
        book, sequence_id = self._context.book, event.sequence_id
        added = () if event.first else (NewSequence(sequence_id, (), (), SamplingParams(temperature=0.0)),)
        part = Slice(sequence_id, event.first, event.token_ids, samples=False)
        batch, tables = Batch(0, (), added, (part,)), (book.table(sequence_id),)
        out = self._run(batch, tables, event.hidden_TD)
        if self._log is not None and not isinstance(out, StepResult):
            self._log.tokens.follow(batch, book)
            self._log.take(batch, tables, out)

    def _run(
        self, batch: Batch, tables: Sequence[Sequence[int]], hidden_TD: torch.Tensor | None
    ) -> StepResult | torch.Tensor:
        layers = self._context.role.layers
        return self._engine.run_stage(batch, tables, hidden_TD, first_layer=layers.start, last_layer=layers.stop)
