"""A leader's core with one dispatcher and no model: the test chooses each step's tokens."""

from collections.abc import Mapping
from itertools import count

from ballast.common.ids import RequestId, WorkerId
from ballast.common.sampling import PriorityClass, SamplingParams
from services.worker.core import events as w
from services.worker.core.batch import SequenceId, StepResult, TokenLogprobs
from services.worker.core.blocks import BlockBook
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.worker import WorkerCore
from services.worker.policy.harvest import Harvest
from services.worker.policy.microbatching import Microbatching, by_token_count
from services.worker.policy.token_target import TokenTarget
from tests.support.worker_core import MEMORY, greedy, limits

TEXT = "ab"  # text of every token
W2 = WorkerId("w2")


class Leader:
    """A leader's core with one dispatcher; `at_s` is the time of the next event."""

    def __init__(
        self,
        block_count: int = 32,
        *,
        stages: int = 1,
        ordinal: int = 1,
        microbatching: Microbatching = by_token_count,
        target: TokenTarget | None = None,
        harvest: Harvest | None = None,
        **bounds: int,
    ) -> None:
        made = limits(**bounds)  # pyright: ignore[reportArgumentType]
        self.book = BlockBook(block_count, made.block_tokens)
        self.core = WorkerCore(
            made,
            block_count,
            book=self.book,
            first_sequence_id=ordinal << 32,
            microbatching=microbatching,
            target=target,
            harvest=harvest,
        )
        self.at_s = 100.0 * ordinal
        self.emits: list[w.Emit] = []
        self._handles = count(1)
        self.feed(w.StreamOpened(self.at_s, 1))
        if stages > 1:
            self.feed(w.RoleChanged(self.at_s, leads=True, stage_count=stages))

    def feed(self, event: w.Event) -> list[w.Command]:
        commands = self.core.handle(event)
        self.core.check()
        self.emits += [c for c in commands if isinstance(c, w.Emit)]
        return commands

    def submit(
        self,
        name: str = "r",
        prompt: tuple[int, ...] = (1, 2, 3),
        output: tuple[int, ...] = (),
        *,
        sampling: SamplingParams | None = None,
        expects: bool = False,
        priority: PriorityClass = PriorityClass.DEFAULT,
        deadline_at_s: float | None = None,
        delivered_chars: int | None = None,
    ) -> w.SequenceKey:
        key = w.SequenceKey(1, next(self._handles))
        self.feed(
            w.Submitted(
                at_s=self.at_s,
                key=key,
                request_id=RequestId(name),
                attempt=1 + bool(output),
                prompt_token_ids=prompt,
                sampling=sampling or greedy(20),
                output_token_ids=output,
                output_text=TEXT * len(output),
                delivered_text_chars=len(TEXT) * len(output) if delivered_chars is None else delivered_chars,
                priority=priority,
                deadline_at_s=deadline_at_s,
                expects_handover=expects,
            )
        )
        return key

    def batch(self) -> w.Execute | None:
        return next((c for c in self.feed(w.BatchWanted(self.at_s)) if isinstance(c, w.Execute)), None)

    def done(self, execute: w.Execute | None, token: int = 5) -> list[w.Command]:
        assert execute is not None
        sampled = sum(s.samples for s in execute.batch.slices)
        logprobs = tuple(TokenLogprobs(token, -1.0, ()) for _ in range(sampled))
        result = StepResult(execute.batch.step_id, (token,) * sampled, logprobs, 0.0)
        return self.feed(w.StepDone(self.at_s, result, (TEXT,) * sampled))

    def step(self, token: int = 5) -> list[SequenceId]:
        """Runs one step; returns the ids of the sequences in it."""
        execute = self.batch()
        if execute is None:
            return []
        self.done(execute, token)
        return [s.sequence_id for s in execute.batch.slices]

    def hand_over(self, to: WorkerId | Mapping[SequenceId, WorkerId] = W2) -> tuple[SequenceSnapshot, ...]:
        (handed_over,) = [c for c in self.feed(w.HandOver(self.at_s, to)) if isinstance(c, w.HandedOver)]
        return tuple(s for _, snapshots in handed_over.snapshots for s in snapshots)

    def adopt(self, snapshots: tuple[SequenceSnapshot, ...], *, travels: bool = False, last: bool = False) -> None:
        """Adopts sequences after reserving blocks for their KV, as the shell does. Returns the commands."""
        for snapshot in snapshots:
            self.book.hold(snapshot.sequence_id, snapshot.computed_tokens)
        ids = frozenset(s.sequence_id for s in snapshots)
        self.feed(w.Adopted(self.at_s, snapshots, suspended_ids=ids if travels else frozenset(), last=last))

    def heard(self, key: w.SequenceKey) -> tuple[list[int], str, w.Ending | None]:
        """What the dispatcher received for one handle."""
        tokens: list[int] = []
        text, ending = "", None
        for emit in self.emits:
            ids = iter(emit.token_ids)
            for index, (handle, token_count) in enumerate(zip(emit.handles, emit.token_counts, strict=True)):
                new = [next(ids) for _ in range(token_count)]
                if handle == key.handle:
                    tokens += new
                    text += emit.texts[index] if emit.texts else ""
            ending = next((e for e in emit.endings if e.handle == key.handle), ending)
        return tokens, text, ending


def reserved(leader: Leader) -> int:
    return leader.core.load(leader.at_s, MEMORY).used_block_count


def handed_over(steps: int = 3, **bounds: int) -> tuple[Leader, tuple[SequenceSnapshot, ...]]:
    """A leader that has run a sequence for `steps` steps and handed it over to w2, and the sequence's snapshot."""
    old = Leader(**bounds)  # pyright: ignore[reportArgumentType]
    old.submit()
    for _ in range(steps):
        old.step()
    return old, old.hand_over()
