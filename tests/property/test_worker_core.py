"""Arbitrary histories of a worker's core: a request's tokens always equal those of an undisturbed request."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ballast.common.cost import CostModel
from ballast.common.load import MemoryReport
from ballast.common.sampling import FinishReason, PriorityClass, SamplingParams
from services.dispatcher.policy.freeness import runs_at_once
from services.worker.core.events import Aborted, DrainRequested, Emit, SequenceKey, StreamClosed, Tick
from services.worker.policy.harvest import Harvest
from services.worker.policy.token_target import TokenTarget
from tests.support.dispatcher_core import view_of
from tests.support.worker_core import VOCAB_SIZE, Driver, certain_chars, greedy, limits, piece, undisturbed

STREAM_IDS = st.integers(1, 3)
SAMPLINGS = st.builds(
    greedy,
    max_tokens=st.integers(3, 30),
    min_tokens=st.integers(0, 3),
    stop=st.just(())
    | st.lists(st.sampled_from(["bcbc", "aba", "babab", "ca aab", "é", "aab ca"]), max_size=3).map(tuple),
    stop_token_ids=st.just(()) | st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2).map(tuple),
    include_stop=st.booleans(),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 2]),
)
TOKEN_IDS = st.integers(0, VOCAB_SIZE - 1)
PROMPTS = st.lists(TOKEN_IDS, min_size=1, max_size=8).map(tuple) | st.lists(TOKEN_IDS, min_size=1, max_size=40).map(
    tuple
)
COST = CostModel(attention_s=1e-5, token_s=0.001, chunk_s=0.01, shared_s=0.01)
NO_MEMORY = MemoryReport(budget_bytes=0, parameter_bytes=0, kv_bytes=0, free_bytes=0)
ENDS_OF_OTHERS = (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR)


class WorkerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[SequenceKey, tuple[int, ...]] = {}
        self.resumed: dict[SequenceKey, tuple[int, int]] = {}  # key -> numbers of (earlier tokens, delivered chars)
        self.with_text: set[SequenceKey] = set()
        self.silenced: set[SequenceKey] = set()  # their stream closed before their end
        self.open_streams: set[int] = set()
        self.draining = False

    @initialize(
        block_count=st.integers(8, 32),
        block_tokens=st.sampled_from([1, 3, 4]),
        max_running_count=st.integers(1, 8),
        extra_budget_tokens=st.integers(0, 20),
        max_waiting_count=st.integers(1, 6),
        reserve_fraction=st.sampled_from([0.0, 0.1]),
        swap=st.sampled_from([(0, 0), (0, 0), (5, 1), (40, 1), (40, 3), (40, 0)]),
        swaps_online=st.booleans(),
        fills=st.booleans(),
        target_s=st.sampled_from([None, None, 1e-9, 0.014, 0.018]),
        ahead=st.booleans(),
    )
    def start(
        self,
        block_count: int,
        block_tokens: int,
        max_running_count: int,
        extra_budget_tokens: int,
        max_waiting_count: int,
        reserve_fraction: float,
        swap: tuple[int, int],
        swaps_online: bool,
        fills: bool,
        target_s: float | None,
        ahead: bool,
    ) -> None:
        self.driver = Driver(
            limits(
                block_tokens=block_tokens,
                max_model_len=48,
                max_running_count=max_running_count,
                max_batch_tokens=max_running_count + extra_budget_tokens,
                max_waiting_count=max_waiting_count,
                max_waiting_tokens=100,
                admission_reserve_fraction=reserve_fraction,
                swap_block_count=swap[0],
                swap_blocks_per_step=swap[1],
                swaps_online=swaps_online,
                async_scheduling=ahead,
            ),
            block_count,
            None if target_s is None else TokenTarget(target_s, lambda: COST),
            Harvest(lambda: COST, 1.0) if fills else None,
        )

    def _open(self, stream_id: int) -> None:
        if stream_id not in self.open_streams:
            self.driver.open(stream_id)
            self.open_streams.add(stream_id)

    @rule(
        stream_id=STREAM_IDS,
        prompt=PROMPTS,
        sampling=SAMPLINGS,
        priority=st.sampled_from(PriorityClass),
        caller=st.integers(0, 2),
        wants_text=st.booleans(),
        deadline_after_s=st.none() | st.floats(-0.01, 0.05),
    )
    def submit(
        self,
        stream_id: int,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        priority: PriorityClass,
        caller: int,
        wants_text: bool,
        deadline_after_s: float | None,
    ) -> None:
        self._open(stream_id)
        deadline_at_s = None if deadline_after_s is None else self.driver.at_s + deadline_after_s
        key = self.driver.submit(
            prompt,
            sampling,
            stream_id=stream_id,
            priority=priority,
            caller=caller,
            wants_text=wants_text,
            deadline_at_s=deadline_at_s,
        )
        self._remember(key, prompt, wants_text)

    @rule(prompts=st.lists(st.lists(TOKEN_IDS, min_size=1, max_size=6).map(tuple), min_size=2, max_size=8))
    def burst(self, prompts: list[tuple[int, ...]]) -> None:
        """Short prompts with long answers: all requests are admitted, and then outgrow the cache together."""
        self._open(1)
        for number, prompt in enumerate(prompts):
            self._remember(self.driver.submit(prompt, greedy(40), caller=number % 3), prompt, True)

    @rule(stream_id=STREAM_IDS, prompt=PROMPTS, sampling=SAMPLINGS, data=st.data())
    def resume(self, stream_id: int, prompt: tuple[int, ...], sampling: SamplingParams, data: st.DataObject) -> None:
        """A request that ran on another worker before; the client has received part of its text."""
        self._open(stream_id)
        whole = undisturbed(prompt, sampling, self.driver.limits.max_model_len).token_ids
        output = whole[: data.draw(st.integers(0, len(whole) - 1))]
        text = "".join(piece(t) for t in output)
        delivered_chars = data.draw(st.integers(0, certain_chars(text, sampling.stop)))
        key = self.driver.submit(prompt, sampling, stream_id=stream_id, output=output, delivered_chars=delivered_chars)
        self.resumed[key] = (len(output), delivered_chars)
        self._remember(key, prompt, True)

    def _remember(self, key: SequenceKey, prompt: tuple[int, ...], wants_text: bool) -> None:
        self.prompts[key] = prompt
        if wants_text:
            self.with_text.add(key)
        if self.draining:
            ending = self.driver.received[key].ending
            assert ending is not None
            assert ending.refused or ending.invalid

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.prompts)))
        self.driver.feed(Aborted(self.driver.at_s, key))
        assert key in self.silenced or self.driver.received[key].ending is not None

    @precondition(lambda self: self.open_streams)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        stream_id = data.draw(st.sampled_from(sorted(self.open_streams)))
        self.open_streams.remove(stream_id)
        self.silenced |= {
            k for k, received in self.driver.received.items() if k.stream_id == stream_id and received.ending is None
        }
        self.driver.preempted = {k for k in self.driver.preempted if k.stream_id != stream_id}
        commands = self.driver.feed(StreamClosed(self.driver.at_s, stream_id))
        assert not any(isinstance(c, Emit) for c in commands)

    @rule(seconds=st.floats(0.0, 0.03))
    def pass_time(self, seconds: float) -> None:
        self.driver.at_s += seconds
        self.driver.feed(Tick(self.driver.at_s))
        due_at_s = self.driver.core.next_deadline_at_s
        assert due_at_s is None or due_at_s > self.driver.at_s

    @rule(block_count=st.integers(1, 4))
    def add_blocks(self, block_count: int) -> None:
        if self.driver.pending is None:
            self.driver.add_blocks(block_count)

    @precondition(lambda self: len(self.prompts) > 25)
    @rule()
    def drain(self) -> None:
        self.draining = True
        self.driver.feed(DrainRequested(self.driver.at_s))

    @rule()
    def want_batch(self) -> None:
        if self.driver.may_want:
            self.driver.want_batch()

    @rule()
    def finish_step(self) -> None:
        if self.driver.pending is not None:
            self.driver.finish_step()

    @rule(count=st.integers(1, 40))
    def steps(self, count: int) -> None:
        for _ in range(count):
            formed = self.driver.want_batch() if self.driver.may_want else None
            if formed is None and self.driver.pending is not None:
                self.driver.finish_step()

    @precondition(lambda self: self.driver.pending is not None and len(self.driver.executed) % 7 == 0)
    @rule()
    def fail_step(self) -> None:
        self.driver.fail_step()

    @invariant()
    def nothing_wrong_was_sent(self) -> None:
        for key, prompt in self.prompts.items():
            self._judge(key, prompt)

    @invariant()
    def routing_knows_what_would_be_let_in(self) -> None:
        """According to the load report, a request runs at once exactly if the worker would admit it at once."""
        if not hasattr(self, "driver") or self.draining:
            return
        core = self.driver.core
        view = view_of(core.load(self.driver.at_s, NO_MEMORY))
        if view.waiting_count or not view.running_count:
            return
        scheduler = core.group_scheduler.scheduler
        prompts_fit = scheduler.prompt_tokens < scheduler.max_prompt_tokens
        for block_count in (1, max(1, view.free_block_count), max(1, view.free_block_count + 1)):
            let_in = prompts_fit and not scheduler.why_no_room(block_count, new=True)
            assert runs_at_once(view, block_count) == let_in, view

    @invariant()
    def dispatchers_know_what_waits_though_it_had_been_let_in(self) -> None:
        if not hasattr(self, "driver"):
            return
        core = self.driver.core
        waiting = [s for s in core.group_scheduler.scheduler.waiting if s.may_overfill or s.output_token_ids]
        swap = core.group_scheduler.scheduler.swap
        assert self.driver.preempted == {s.key for s in (*waiting, *swap.away, *swap.offline_away)}

    @invariant()
    def no_more_prompts_are_let_in_than_are_computed_soon(self) -> None:
        if hasattr(self, "driver") and not self.driver.limits.swap_block_count:
            scheduler = self.driver.core.group_scheduler.scheduler
            assert scheduler.prompt_tokens < scheduler.max_prompt_tokens + self.driver.limits.max_batch_tokens

    def _judge(self, key: SequenceKey, prompt: tuple[int, ...]) -> None:
        received = self.driver.received[key]
        ending = received.ending
        if key in self.silenced:
            assert ending is None
        if not received.token_ids and (ending is None or ending.finish_reason in (None, *ENDS_OF_OTHERS)):
            return
        want = self.driver.expected(key, prompt)
        earlier_tokens, delivered_chars = self.resumed.get(key, (0, 0))
        tokens = want.token_ids[earlier_tokens:]
        text = want.text[delivered_chars:] if key in self.with_text else ""
        assert tuple(received.token_ids) == tokens[: len(received.token_ids)]
        if ending is None:
            assert text.startswith(received.text)
        elif ending.finish_reason in ENDS_OF_OTHERS:  # all pending text is sent
            sent = want.token_ids[: earlier_tokens + len(received.token_ids)]
            whole_text = "".join(piece(t) for t in sent)[delivered_chars:]
            assert received.text == (whole_text if key in self.with_text else "")
        else:
            assert (len(received.token_ids), received.text) == (len(tokens), text)
            assert (ending.finish_reason, ending.matched_stop) == (want.finish_reason, want.matched_stop)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run_to_end()
        for key, prompt in self.prompts.items():
            self._judge(key, prompt)
            assert (self.driver.received[key].ending is None) == (key in self.silenced)
        self.driver.assert_empty()
        totals = self.driver.core.totals
        assert totals.refused + sum(totals.endings.values()) == len(self.prompts)
        assert self.driver.core.is_drained == self.draining


TestWorker = WorkerMachine.TestCase
TestWorker.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
