"""Drives a WorkerCore as the engine thread does, with a model that is a hash of the tokens found in its KV cache.

The fake cache stores token ids in blocks, and the fake model reads them back through the block tables. A block used by
two sequences, a table in the wrong order, or a stale chunk therefore yields a wrong token.
"""

import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from ballast.common.ids import RequestId
from ballast.common.load import MemoryReport
from ballast.common.sampling import FinishReason, PriorityClass, SamplingParams
from ballast.common.targets import NO_TARGETS, Targets
from services.worker.core import events as w
from services.worker.core.batch import IN_FLIGHT, NewSequence, Slice, StepResult, TokenLogprobs
from services.worker.core.limits import WorkerLimits
from services.worker.core.worker import WorkerCore
from services.worker.policy.harvest import Harvest
from services.worker.policy.token_target import TokenTarget

VOCAB_SIZE = 97
EOS = 96
# Few letters, so that stop strings match and almost match often. A token may also have no text.
PIECES = ("a", "b", "ab", "", "ba", "aab", "c", "bc", "é", "ca ")
MEMORY = MemoryReport(budget_bytes=4, parameter_bytes=2, kv_bytes=1, free_bytes=1)


def next_token(token_ids: list[int]) -> int:
    return zlib.crc32(bytes(token_ids)) % VOCAB_SIZE


def piece(token_id: int) -> str:
    return PIECES[token_id % len(PIECES)]


@dataclass(frozen=True)
class Undisturbed:
    """The answer of a request that nothing disturbs."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    matched_stop: str


def undisturbed(prompt: tuple[int, ...], sampling: SamplingParams, max_model_len: int) -> Undisturbed:
    """The answer of an undisturbed request, computed directly from the rules, token by token over the whole text: slow,
    and independent of the code under test.
    """
    output: list[int] = []
    text = ""
    stop_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    while True:
        token_id = next_token([*prompt, *output])
        output.append(token_id)
        before, text = text, text + piece(token_id)
        if len(output) > sampling.min_tokens:
            if token_id in stop_ids:
                shown = text if sampling.include_stop_str_in_output else before
                return Undisturbed(tuple(output), shown, FinishReason.STOP, str(token_id))
            matches = [
                (begin + len(stop), begin, stop)
                for stop in sampling.stop
                for begin in range(len(text))
                if text.startswith(stop, begin) and begin + len(stop) > len(before)
            ]
            if matches:
                end, begin, stop = min(matches)
                shown = text[:end] if sampling.include_stop_str_in_output else text[:begin]
                return Undisturbed(tuple(output), shown, FinishReason.STOP, stop)
        if len(output) == sampling.max_tokens or len(prompt) + len(output) == max_model_len:
            return Undisturbed(tuple(output), text, FinishReason.LENGTH, "")


def certain_chars(text: str, stops: tuple[str, ...]) -> int:
    """Number of characters of `text` that cannot be part of a stop string still in progress."""
    begun = [n for n in range(1, len(text) + 1) if any(s != text[-n:] and s.startswith(text[-n:]) for s in stops)]
    return len(text) - max(begun, default=0)


class FakeEngine:
    """Follows the contract in core.batch, and fails if the core does not."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._cache: dict[tuple[int, int], int] = {}  # (block id, offset) -> token id
        self._known: dict[int, NewSequence] = {}
        self._text_wanted: dict[int, bool] = {}
        self._computed: dict[int, int] = {}  # sequence id -> tokens with KV
        self._sampled: dict[int, int] = {}  # sequence id -> its token in the last batch
        self._host: dict[int, dict[int, int]] = {}  # host block id -> offset -> token id
        self.copied_blocks = 0

    @property
    def known_ids(self) -> list[int]:
        return list(self._known)

    def forget_all(self) -> None:
        """Forgets the sequences, as at a change of the group, but not their KV."""
        self._known.clear()

    def run(self, execute: w.Execute) -> tuple[StepResult, tuple[str, ...]]:
        batch = execute.batch
        for sequence_id in batch.removed:
            for known in (self._known, self._computed, self._text_wanted):
                known.pop(sequence_id, None)  # a sequence whose KV was swapped in may not be known yet
        for new, text_wanted in zip(batch.added, execute.text_wanted, strict=True):
            assert new.sequence_id not in self._known
            self._known[new.sequence_id] = new
            self._text_wanted[new.sequence_id] = text_wanted
        assert len({s.sequence_id for s in batch.slices}) == len(batch.slices)
        written = zip(batch.slices, execute.block_tables, strict=True)
        written_blocks = {table[b] for part, table in written for b in _blocks_of(part, self._block_tokens)}
        touched = {block for table in execute.block_tables for block in table}
        for copy in execute.copies:
            assert not (written_blocks if copy.out else touched).intersection(copy.device_blocks)
        early = batch.step_id % 2 == 0  # copies may be made at any time during the step
        if early:
            self._copy(execute.copies)
        slices = [self._with_known(part) for part in batch.slices]
        token_ids: list[int] = []
        texts: list[str] = []
        logprobs: list[TokenLogprobs | None] = []
        for part, table in zip(slices, execute.block_tables, strict=True):
            self._write(part, table)
        for part, table in zip(slices, execute.block_tables, strict=True):
            if part.samples:
                token_id = next_token(self._read(self._computed[part.sequence_id], table))
                token_ids.append(token_id)
                texts.append(piece(token_id) if self._text_wanted[part.sequence_id] else "")
                wanted = self._known[part.sequence_id].sampling.logprobs is not None
                logprobs.append(TokenLogprobs(token_id, -1.0, ()) if wanted else None)
        if not early:
            self._copy(execute.copies)
        if batch.slices:
            self._sampled = dict(zip([s.sequence_id for s in slices if s.samples], token_ids, strict=True))
        return StepResult(batch.step_id, tuple(token_ids), tuple(logprobs), 0.001), tuple(texts)

    def _with_known(self, part: Slice) -> Slice:
        if IN_FLIGHT not in part.token_ids:
            return part
        assert part.token_ids == (IN_FLIGHT,)
        return part._replace(token_ids=(self._sampled[part.sequence_id],))

    def _copy(self, copies: tuple[w.BlockCopy, ...]) -> None:
        for copy in copies:
            for device, host in zip(copy.device_blocks, copy.host_blocks, strict=True):
                self.copied_blocks += 1
                if copy.out:
                    self._host[host] = {p: token_id for (b, p), token_id in self._cache.items() if b == device}
                    continue
                for place in range(self._block_tokens):
                    self._cache.pop((device, place), None)
                self._cache.update({(device, place): token_id for place, token_id in self._host[host].items()})

    def move(self, moves: Iterable[tuple[int, int]]) -> None:
        """Moves the content of blocks, given as (from, to) pairs."""
        for source, to in moves:
            for place in range(self._block_tokens):
                if (token_id := self._cache.pop((source, place), None)) is not None:
                    self._cache[to, place] = token_id

    def _write(self, part: Slice, table: tuple[int, ...]) -> None:
        assert part.first_position == self._computed.setdefault(part.sequence_id, part.first_position)
        assert part.token_ids
        new = self._known[part.sequence_id]
        known = (new.prompt_token_ids + new.output_token_ids)[part.first_position :]  # as of its addition to the batch
        assert part.token_ids[: len(known)] == known[: len(part.token_ids)]
        for position, token_id in enumerate(part.token_ids, part.first_position):
            self._cache[table[position // self._block_tokens], position % self._block_tokens] = token_id
        self._computed[part.sequence_id] += len(part.token_ids)

    def _read(self, token_count: int, table: tuple[int, ...]) -> list[int]:
        return [self._cache[table[p // self._block_tokens], p % self._block_tokens] for p in range(token_count)]


def _blocks_of(part: Slice, block_tokens: int) -> range:
    """Table indices of the blocks that the slice writes. Others may copy the blocks that it only reads."""
    return range(part.first_position // block_tokens, -(-(part.first_position + len(part.token_ids)) // block_tokens))


@dataclass
class Received:
    """What a dispatcher received for one handle."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs_count: int = 0
    ending: w.Ending | None = None


class Driver:
    """Feeds events to the core, collects its output, and calls check() after each event."""

    def __init__(
        self,
        limits: WorkerLimits,
        block_count: int,
        target: TokenTarget | None = None,
        harvest: Harvest | None = None,
    ) -> None:
        self.limits = limits
        self.core = WorkerCore(limits, block_count, target=target, harvest=harvest)
        self.engine = FakeEngine(limits.block_tokens)
        self.at_s = 0.0
        self._launched: deque[tuple[w.Execute, tuple[StepResult, tuple[str, ...]] | None]] = deque()
        self.received: dict[w.SequenceKey, Received] = {}
        self.sampling: dict[w.SequenceKey, SamplingParams] = {}
        self.executed: list[w.Execute] = []
        self.copied_alone = False  # whether the last batch only copied blocks
        self.preempted: set[w.SequenceKey] = set()  # reported as waiting again after they had been admitted
        self._handles: Iterator[int] = count(1)

    @property
    def pending(self) -> w.Execute | None:
        """The oldest batch in flight."""
        return self._launched[0][0] if self._launched else None

    @property
    def may_want(self) -> bool:
        """Whether another batch may be in flight."""
        return not self._launched or (self.core.has_work and len(self._launched) < 1 + self.limits.async_scheduling)

    def feed(self, event: w.Event) -> list[w.Command]:
        commands = self.core.handle(event)
        self.core.check()
        assert sum(isinstance(c, w.Execute) for c in commands) <= 1
        for command in commands:
            match command:
                case w.Execute():
                    assert len(self._launched) < 1 + self.limits.async_scheduling
                    assert sum(len(s.token_ids) for s in command.batch.slices) <= self.limits.max_batch_tokens
                    self._launch(command)
                    self.executed.append(command)
                case w.Emit():
                    self._receive(command)
                case w.Removed():
                    assert not command.batch.slices
                    self.engine.run(w.Execute(command.batch, (), (), command.copies))
                    self.copied_alone = bool(command.copies)
                case _:
                    raise AssertionError(f"unexpected: {command}")
        return commands

    def _launch(self, execute: w.Execute) -> None:
        """Launches a batch. With async scheduling it runs at launch, in launch order; a batch with safepoints may be
        preempted, so it runs later.
        """
        ahead = self.limits.async_scheduling and not execute.batch.safepoint_layers
        self._launched.append((execute, self.engine.run(execute) if ahead else None))

    def _receive(self, emit: w.Emit) -> None:
        assert len(emit.handles) == len(emit.token_counts)
        assert sum(emit.token_counts) == len(emit.token_ids)
        assert emit.texts == () or len(emit.texts) == len(emit.handles)
        tokens, logprobs = iter(emit.token_ids), iter(emit.logprobs)
        for index, handle in enumerate(emit.handles):
            assert handle <= emit.seen_handle
            key = w.SequenceKey(emit.stream_id, handle)
            received = self.received[key]
            assert received.ending is None, f"{key} gets tokens after its end"
            for _ in range(emit.token_counts[index]):
                assert key not in self.preempted, f"{key} gets tokens although reported to wait"
                received.token_ids.append(next(tokens))
                if self.sampling[key].logprobs is not None:
                    assert next(logprobs).token_id == received.token_ids[-1]
            received.text += emit.texts[index] if emit.texts else ""
        assert next(logprobs, None) is None
        self._hear_who_waits(emit)
        for ending in emit.endings:
            self.preempted.discard(w.SequenceKey(emit.stream_id, ending.handle))
            received = self.received[w.SequenceKey(emit.stream_id, ending.handle)]
            assert received.ending is None, f"{emit.stream_id}/{ending.handle} ends twice"
            assert not (ending.refused and received.token_ids)
            received.ending = ending

    def _hear_who_waits(self, emit: w.Emit) -> None:
        waits, runs = (
            {w.SequenceKey(emit.stream_id, h) for h in handles} for handles in (emit.preempted, emit.resumed)
        )
        assert len(waits) + len(runs) == len(emit.preempted) + len(emit.resumed), "reported twice"
        assert not waits & self.preempted, "reported again"
        assert runs <= self.preempted, "resumed without being reported to wait"
        assert all(self.received[key].ending is None for key in waits | runs)
        self.preempted = (self.preempted | waits) - runs

    # ---------------------------------------------------------------- shorthand for events

    def open(self, stream_id: int) -> None:
        self.feed(w.StreamOpened(self.at_s, stream_id))

    def submit(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams | None = None,
        *,
        stream_id: int = 1,
        output: tuple[int, ...] = (),
        delivered_chars: int = 0,
        priority: PriorityClass = PriorityClass.DEFAULT,
        deadline_at_s: float | None = None,
        wants_text: bool = True,
        cache_salt: bytes = b"",
        targets: Targets = NO_TARGETS,
        caller: int = 0,
    ) -> w.SequenceKey:
        key = w.SequenceKey(stream_id, next(self._handles))
        self.received[key] = Received()
        self.sampling[key] = sampling or greedy()
        self.feed(
            w.Submitted(
                at_s=self.at_s,
                key=key,
                request_id=RequestId(f"r{key.handle}"),
                attempt=1,
                prompt_token_ids=prompt,
                sampling=self.sampling[key],
                output_token_ids=output,
                output_text="".join(piece(t) for t in output),
                delivered_text_chars=delivered_chars,
                priority=priority,
                deadline_at_s=deadline_at_s,
                wants_text=wants_text,
                cache_salt=cache_salt,
                targets=targets,
                caller=caller,
            )
        )
        return key

    def want_batch(self) -> w.Execute | None:
        had_work = self.core.has_work
        self.copied_alone, before = True, len(self._launched)
        while self.copied_alone and len(self._launched) == before:
            self.copied_alone = False
            self.feed(w.BatchWanted(self.at_s))
        assert self.pending is not None or not had_work or not self.core.has_work, "no batch although there is work"
        return self._launched[-1][0] if len(self._launched) > before else None

    def finish_step(self) -> list[w.Command]:
        execute, ran = self._launched.popleft()
        result, texts = ran or self.engine.run(execute)
        self.at_s += 0.001
        return self.feed(w.StepDone(self.at_s, result, texts))

    def fail_step(self) -> None:
        """Fails the oldest batch; it writes no KV unless it had been launched ahead."""
        self.feed(w.StepFailed(self.at_s, self._run_without_slices(), "out of luck"))

    def preempt_step(self) -> None:
        """Preempts the oldest batch at its first safepoint, before it writes any KV."""
        assert self.pending is not None
        assert self.pending.batch.safepoint_layers
        self.feed(w.StepPreempted(self.at_s, self._run_without_slices()))

    def _run_without_slices(self) -> int:
        execute, ran = self._launched.popleft()
        if ran is None:
            self.engine.run(replace(execute, batch=replace(execute.batch, slices=()), block_tables=()))
        return execute.batch.step_id

    def step(self) -> w.Execute | None:
        execute = self.want_batch()
        if execute is not None:
            self.finish_step()
        return execute

    def add_blocks(self, block_count: int) -> None:
        self.core.group_scheduler.book.grow(block_count)
        self.feed(w.CapacityChanged(self.at_s, self.core.group_scheduler.book.block_count))

    def run_to_end(self, max_steps: int = 5_000) -> int:
        """Runs steps until no work is left. Returns their number."""
        steps = 0
        for _ in range(2 * max_steps):
            if self.may_want and self.want_batch() is not None:
                steps += 1
            elif self._launched:
                self.finish_step()
            else:
                assert not self.core.has_work
                return steps
        raise AssertionError(f"work left after {max_steps} steps")

    def expected(self, key: w.SequenceKey, prompt: tuple[int, ...]) -> Undisturbed:
        return undisturbed(prompt, self.sampling[key], self.limits.max_model_len)

    def assert_empty(self) -> None:
        """Checks that all counts of held resources are zero."""
        load = self.core.load(self.at_s, MEMORY)
        held = (load.used_block_count, load.waiting_block_count, load.running_count, load.waiting_count)
        assert held == (0, 0, 0, 0)
        assert self.engine.known_ids == []
        assert load.step_age_s == 0.0


def greedy(
    max_tokens: int = 8,
    *,
    min_tokens: int = 0,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    include_stop: bool = False,
    ignore_eos: bool = True,
    logprobs: int | None = None,
) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop,
        stop_token_ids=stop_token_ids,
        include_stop_str_in_output=include_stop,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )


def limits(
    *,
    block_tokens: int = 4,
    max_model_len: int = 64,
    max_running_count: int = 4,
    max_batch_tokens: int = 16,
    max_waiting_count: int = 8,
    max_waiting_tokens: int = 1_000,
    admission_reserve_fraction: float = 0.0,
    swap_block_count: int = 0,
    swap_blocks_per_step: int = 0,
    swaps_online: bool = True,
    prefix_caching: bool = False,
    async_scheduling: bool = False,
) -> WorkerLimits:
    return WorkerLimits(
        block_tokens=block_tokens,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
        max_running_count=max_running_count,
        max_batch_tokens=max_batch_tokens,
        max_waiting_count=max_waiting_count,
        max_waiting_tokens=max_waiting_tokens,
        admission_reserve_fraction=admission_reserve_fraction,
        swap_block_count=swap_block_count,
        swap_blocks_per_step=swap_blocks_per_step,
        swaps_online=swaps_online,
        prefix_caching=prefix_caching,
        async_scheduling=async_scheduling,
    )
