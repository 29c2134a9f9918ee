"""Stories of a leader whose group changes. There is no model: a step gives whatever tokens the story wants."""

from collections.abc import Mapping
from itertools import count

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import RequestId, WorkerId
from ballast.common.sampling import FinishReason, PriorityClass, SamplingParams
from services.worker.core.batch import SequenceId, StepResult, TokenLogprobs
from services.worker.core.events import (
    Aborted,
    AdmissionLimited,
    Adopted,
    BatchWanted,
    CapacityChanged,
    Command,
    Emit,
    Ending,
    Event,
    Execute,
    HandedOver,
    HandOver,
    KvArrived,
    KvLost,
    KvTravels,
    Removed,
    RoleChanged,
    SequenceKey,
    StepDone,
    StreamClosed,
    StreamOpened,
    Submitted,
    Tick,
)
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.stage import StageBook
from services.worker.core.worker import WorkerCore
from tests.support.worker_core import MEMORY, greedy, limits

TEXT = "ab"  # of every token
W2 = WorkerId("w2")


class Leader:
    """A core with one dispatcher; `at_s` is the time of its next event."""

    def __init__(self, block_count: int = 32, *, stages: int = 1, ordinal: int = 1, **bounds: int) -> None:
        made = limits(**bounds)  # pyright: ignore[reportArgumentType]
        self.book = StageBook(block_count, made.block_tokens)
        self.core = WorkerCore(made, block_count, book=self.book, first_sequence_id=ordinal << 32)
        self.at_s = 100.0 * ordinal
        self.emits: list[Emit] = []
        self._handles = count(1)
        self.feed(StreamOpened(self.at_s, 1))
        if stages > 1:
            self.feed(RoleChanged(self.at_s, leads=True, stage_count=stages))

    def feed(self, event: Event) -> list[Command]:
        commands = self.core.handle(event)
        self.core.check()
        self.emits += [c for c in commands if isinstance(c, Emit)]
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
    ) -> SequenceKey:
        key = SequenceKey(1, next(self._handles))
        self.feed(
            Submitted(
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

    def batch(self) -> Execute | None:
        return next((c for c in self.feed(BatchWanted(self.at_s)) if isinstance(c, Execute)), None)

    def done(self, execute: Execute | None, token: int = 5) -> list[Command]:
        assert execute is not None
        sampled = sum(s.samples for s in execute.batch.slices)
        logprobs = tuple(TokenLogprobs(token, -1.0, ()) for _ in range(sampled))
        result = StepResult(execute.batch.step_id, (token,) * sampled, logprobs, 0.0)
        return self.feed(StepDone(self.at_s, result, (TEXT,) * sampled))

    def step(self, token: int = 5) -> list[SequenceId]:
        """One step; who took part in it."""
        execute = self.batch()
        if execute is None:
            return []
        self.done(execute, token)
        return [s.sequence_id for s in execute.batch.slices]

    def hand_over(self, to: WorkerId | Mapping[SequenceId, WorkerId] = W2) -> tuple[SequenceSnapshot, ...]:
        (handed_over,) = [c for c in self.feed(HandOver(self.at_s, to)) if isinstance(c, HandedOver)]
        return tuple(s for _, snapshots in handed_over.snapshots for s in snapshots)

    def adopt(self, snapshots: tuple[SequenceSnapshot, ...], *, travels: bool = False, last: bool = False) -> None:
        """With blocks for the KV here, as the shell sees to."""
        for snapshot in snapshots:
            self.book.hold(snapshot.sequence_id, snapshot.computed_tokens)
        ids = frozenset(s.sequence_id for s in snapshots)
        self.feed(Adopted(self.at_s, snapshots, suspended_ids=ids if travels else frozenset(), last=last))

    def heard(self, key: SequenceKey) -> tuple[list[int], str, Ending | None]:
        """What the dispatcher got for one handle."""
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
    """One sequence that has come through so many steps, and goes to w2."""
    old = Leader(**bounds)
    old.submit()
    for _ in range(steps):
        old.step()
    return old, old.hand_over()


# ---------------------------------------------------------------- several batches in flight


def test_as_many_batches_as_stages_are_in_flight_with_nobody_in_two() -> None:
    leader = Leader(stages=3, max_running_count=4, max_batch_tokens=16)
    for number in range(6):
        leader.submit(f"r{number}")
    flying = [leader.batch() for _ in range(3)]
    assert leader.core.in_flight_count == 3
    assert not leader.core.has_work
    with pytest.raises(InvariantViolation, match="a batch is wanted while step 1 runs"):
        leader.core.handle(BatchWanted(0.0))
    for execute in flying:
        leader.done(execute)
    for _ in range(4):  # from now on each takes a third
        execute = leader.batch()
        assert execute is not None
        assert len(execute.batch.slices) == 2
        if leader.core.in_flight_count == 3:
            break
    assert leader.core.in_flight_count == 3


def test_results_come_in_the_order_of_the_batches() -> None:
    leader = Leader(stages=2, max_running_count=4, max_batch_tokens=4)
    leader.submit("a")
    leader.submit("b")
    leader.batch()
    second = leader.batch()
    with pytest.raises(InvariantViolation, match="step 2 is reported, step 1 was running"):
        leader.done(second)


def test_who_needs_the_block_of_a_sequence_in_flight_skips_a_batch() -> None:
    leader = Leader(4, stages=2, block_tokens=4, max_running_count=2, max_batch_tokens=8)
    first = leader.submit("first", (1, 2, 3, 4, 5, 6, 7))
    leader.step()
    leader.submit("second", (1, 2, 3, 4, 5, 6, 7))
    leader.step()  # the first alone would do, but both take part
    while leader.core.totals.preemptions == 0:
        flying = leader.batch()
        assert flying is not None
        follower = leader.batch() if leader.core.has_work else None
        leader.done(flying)
        if follower is not None:
            leader.done(follower)
    assert leader.heard(first)[2] is None
    assert leader.core.load(leader.at_s, MEMORY).waiting_count == 1  # the second gave way, between two batches


def test_an_aborted_sequence_is_removed_by_the_next_batch_while_others_fly() -> None:
    leader = Leader(stages=2, max_running_count=4, max_batch_tokens=4)
    gone = leader.submit("gone")
    leader.submit("stays")
    flying = leader.batch()
    leader.feed(Aborted(leader.at_s, gone))
    assert reserved(leader) == 1
    following = leader.batch()
    assert following is not None
    assert following.batch.removed == ((1 << 32) + 1,)
    leader.done(flying)
    leader.done(following)
    assert leader.heard(gone)[0] == []


def test_ids_follow_on_the_first_one() -> None:
    leader = Leader(ordinal=7)
    leader.submit()
    assert leader.core.sequence_ids == ((7 << 32) + 1,)


# ---------------------------------------------------------------- capacity


def test_a_smaller_group_preempts_the_latest_and_says_when_it_has_settled() -> None:
    leader = Leader(8, block_tokens=4)
    for number in range(4):
        leader.submit(f"r{number}", (1, 2, 3, 4, 5))  # two blocks each
    leader.step()
    commands = leader.feed(CapacityChanged(leader.at_s, 5))
    assert [c.batch.removed for c in commands if isinstance(c, Removed)] == [((1 << 32) + 4, (1 << 32) + 3)]
    assert reserved(leader) == 4
    assert leader.core.settled


def test_in_flight_nobody_is_preempted() -> None:
    leader = Leader(8, block_tokens=4)
    for number in range(4):
        leader.submit(f"r{number}", (1, 2, 3, 4))
    flying = leader.batch()
    leader.feed(CapacityChanged(leader.at_s, 5))
    assert not leader.core.settled
    leader.done(flying)
    assert reserved(leader) == 4
    leader.feed(CapacityChanged(leader.at_s, 5))  # tells the stages
    assert leader.core.settled


def test_lent_blocks_are_not_given_to_anybody_and_harm_nobody() -> None:
    leader = Leader(8, block_tokens=4)
    leader.feed(CapacityChanged(leader.at_s, 8, lent_block_count=7))
    key = leader.submit("r", (1, 2, 3, 4, 5))
    assert not leader.core.has_work
    leader.feed(CapacityChanged(leader.at_s, 8))
    assert leader.step()
    assert leader.heard(key)[0] == [5]


def test_who_does_not_fit_into_the_smaller_group_even_alone_ends() -> None:
    leader = Leader(8, block_tokens=4)
    key = leader.submit("r", tuple(range(1, 20)))
    leader.feed(CapacityChanged(leader.at_s, 4))
    ending = leader.heard(key)[2]
    assert ending is not None
    assert (ending.finish_reason, ending.invalid) == (FinishReason.ERROR, True)


def test_nothing_new_is_admitted_above_the_limit_and_what_runs_goes_on_growing() -> None:
    leader = Leader(12, block_tokens=1, max_batch_tokens=16)
    leader.submit("old")
    leader.step()
    leader.feed(AdmissionLimited(leader.at_s, 4))
    leader.submit("new", (1,))
    for _ in range(3):
        assert leader.step() == [(1 << 32) + 1]
    assert reserved(leader) > 4
    leader.feed(AdmissionLimited(leader.at_s, None))
    assert len(leader.step()) == 2


# ---------------------------------------------------------------- KV on its way


def test_a_suspended_sequence_is_left_out_and_goes_on_where_it_was() -> None:
    leader = Leader()
    key = leader.submit()
    leader.step()
    (sequence_id,) = leader.core.sequence_ids
    leader.feed(KvTravels(leader.at_s, frozenset({sequence_id})))
    assert not leader.core.has_work
    assert leader.core.suspended_ids == (sequence_id,)
    assert leader.core.kv_tokens == {sequence_id: 3}
    leader.feed(KvArrived(leader.at_s, sequence_id))
    execute = leader.batch()
    assert execute is not None
    assert [(s.first_position, len(s.token_ids)) for s in execute.batch.slices] == [(3, 1)]
    leader.done(execute)
    assert leader.heard(key)[0] == [5, 5]


@pytest.mark.parametrize("suspended", [True, False])
def test_lost_kv_is_computed_again(suspended: bool) -> None:
    leader = Leader()
    leader.submit()
    leader.step()
    (sequence_id,) = leader.core.sequence_ids
    if suspended:
        leader.feed(KvTravels(leader.at_s, frozenset({sequence_id})))
    leader.feed(KvLost(leader.at_s, sequence_id))
    execute = leader.batch()
    assert execute is not None
    assert execute.batch.slices[0].token_ids == (1, 2, 3, 5)
    assert [new.output_token_ids for new in execute.batch.added] == [(5,)]


def test_kv_of_a_sequence_in_flight_cannot_be_lost() -> None:
    leader = Leader()
    leader.submit()
    leader.batch()
    with pytest.raises(InvariantViolation, match="loses its KV while it is in flight"):
        leader.core.handle(KvLost(leader.at_s, leader.core.sequence_ids[0]))


@pytest.mark.parametrize("landed", [KvArrived, KvLost])
def test_blocks_that_kv_travels_into_stay_taken_when_the_request_ends(landed: type[KvArrived | KvLost]) -> None:
    leader = Leader()
    key = leader.submit()
    leader.step()
    (sequence_id,) = leader.core.sequence_ids
    leader.feed(KvTravels(leader.at_s, frozenset({sequence_id})))
    commands = leader.feed(Aborted(leader.at_s, key))
    assert not any(isinstance(c, Removed) for c in commands)
    assert leader.heard(key)[2] == Ending(key.handle, FinishReason.CANCELLED)
    assert reserved(leader) == 1
    commands = leader.feed(landed(leader.at_s, sequence_id))
    assert [c.batch.removed for c in commands if isinstance(c, Removed)] == [(sequence_id,)]
    assert reserved(leader) == 0


@pytest.mark.parametrize("event", [KvArrived(0.0, 77), KvLost(0.0, 77)])
def test_news_of_kv_that_nobody_waits_for_is_stale(event: Event) -> None:
    leader = Leader()
    assert leader.feed(event) == []
    assert leader.core.totals.stale_events == 1


# ---------------------------------------------------------------- handover


def test_dispatchers_hear_where_their_requests_go_and_the_rest_stays() -> None:
    leader = Leader()
    keys = [leader.submit(f"r{number}") for number in range(3)]
    leader.step()
    first, second, third = leader.core.sequence_ids
    snapshots = leader.hand_over({first: WorkerId("w2"), third: WorkerId("w3"), 99: WorkerId("w3")})
    assert [s.sequence_id for s in snapshots] == [first, third]
    assert [leader.heard(key)[2] for key in keys] == [
        Ending(keys[0].handle, None, moved_to="w2"),
        None,
        Ending(keys[2].handle, None, moved_to="w3"),
    ]
    assert leader.core.sequence_ids == (second,)
    assert leader.book.table(first)  # its KV has yet to be sent
    assert leader.core.totals.moved == 2


def test_nothing_changes_hands_in_mid_step() -> None:
    leader = Leader()
    leader.submit()
    leader.batch()
    for event in (HandOver(0.0, W2), RoleChanged(0.0, leads=False), KvTravels(0.0, frozenset()), Adopted(0.0, ())):
        with pytest.raises(InvariantViolation, match="while step 1 runs"):
            leader.core.handle(event)


def test_what_was_removed_is_told_before_a_handover() -> None:
    leader = Leader()
    gone = leader.submit("gone")
    leader.submit("stays")
    leader.step()
    leader.feed(Aborted(leader.at_s, gone))
    commands = leader.feed(HandOver(leader.at_s, WorkerId("w2")))
    assert [type(c) for c in commands] == [Emit, Removed, HandedOver]


def test_a_follower_refuses_what_is_new_and_does_not_adopt() -> None:
    leader, snapshots = handed_over()
    leader.feed(RoleChanged(leader.at_s, leads=False))
    ending = leader.heard(leader.submit("new"))[2]
    assert ending is not None
    assert ending.refused
    with pytest.raises(InvariantViolation, match="a follower is handed sequences over"):
        leader.core.handle(Adopted(leader.at_s, snapshots))


def test_who_has_sequences_cannot_become_a_follower() -> None:
    leader = Leader()
    leader.submit()
    with pytest.raises(InvariantViolation, match="1 sequences that were not handed over"):
        leader.core.handle(RoleChanged(leader.at_s, leads=False))


@pytest.mark.parametrize("travels", [True, False])
def test_an_adopted_sequence_goes_on_and_its_dispatcher_misses_nothing(travels: bool) -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    leader.adopt(snapshots, travels=travels)
    if travels:
        assert leader.step() == []
        leader.feed(KvArrived(leader.at_s, snapshots[0].sequence_id))
    assert [leader.step(6), leader.step(7)] == [[snapshots[0].sequence_id]] * 2
    assert leader.emits == []
    key = leader.submit("r", output=(5, 5, 5))
    assert leader.heard(key) == ([6, 7], TEXT * 2, None)
    leader.step(8)
    assert leader.heard(key) == ([6, 7, 8], TEXT * 3, None)
    assert leader.core.orphan_count == 0


def test_a_dispatcher_that_is_faster_than_the_handover_waits_for_it() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    key = leader.submit("r", output=(5, 5, 5), expects=True)
    assert not leader.core.has_work
    leader.adopt(snapshots)
    execute = leader.batch()
    assert execute is not None
    assert execute.batch.slices[0].first_position == 5  # with its KV
    leader.done(execute, 6)
    assert leader.heard(key) == ([6], TEXT, None)
    assert leader.core.sequence_ids == (snapshots[0].sequence_id,)


@pytest.mark.parametrize("how", ["last", "timeout"])
def test_who_waits_in_vain_is_resumed_without_kv(how: str) -> None:
    leader = Leader(ordinal=2)
    key = leader.submit("r", output=(5, 5), expects=True)
    if how == "last":
        leader.adopt((), last=True)
    else:
        due_at_s = leader.core.next_deadline_at_s
        assert due_at_s is not None
        assert due_at_s == leader.at_s + 10.0
        leader.at_s = due_at_s
        leader.feed(Tick(leader.at_s))
    execute = leader.batch()
    assert execute is not None
    assert execute.batch.slices[0].token_ids == (1, 2, 3, 5, 5)
    leader.done(execute, 6)
    assert leader.heard(key)[0] == [6]


def test_who_waits_in_vain_at_a_follower_is_refused() -> None:
    follower = Leader()
    follower.feed(RoleChanged(follower.at_s, leads=False))
    key = follower.submit("r", output=(5,), expects=True)
    assert follower.heard(key)[2] is None
    follower.feed(Tick(follower.at_s + 10.0))
    ending = follower.heard(key)[2]
    assert ending is not None
    assert ending.refused


@pytest.mark.parametrize("way", ["abort", "deadline", "close", "move"])
def test_who_waits_can_leave(way: str) -> None:
    leader = Leader(ordinal=2)
    key = leader.submit("r", output=(5,), expects=True, deadline_at_s=leader.at_s + 1.0)
    leaving: dict[str, Event] = {
        "abort": Aborted(leader.at_s, key),
        "deadline": Tick(leader.at_s + 1.0),
        "close": StreamClosed(leader.at_s, 1),
        "move": HandOver(leader.at_s, WorkerId("w3")),
    }
    leader.feed(leaving[way])
    assert leader.core.sequence_ids == ()
    ending = leader.heard(key)[2]
    reasons = {"abort": FinishReason.CANCELLED, "deadline": FinishReason.DEADLINE}
    assert (ending is None) == (way == "close")
    if ending is not None:
        assert (ending.finish_reason, ending.moved_to) == (reasons.get(way), "w3" if way == "move" else "")


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("prompt", "output", "delivered_chars"),
    [
        ((1, 2, 4), (5, 5, 5), 6),  # another prompt
        ((1, 2, 3), (5, 5, 9), 6),  # other tokens
        ((1, 2, 3), (5,), 2),  # lacks what was sent
        ((1, 2, 3), (5, 5, 5), 4),  # lacks text that was sent
        ((1, 2, 3), (5, 5, 5), 7),  # has text that there never was
    ],
)
def test_a_request_that_disagrees_starts_anew_and_the_orphan_goes(
    prompt: tuple[int, ...], output: tuple[int, ...], delivered_chars: int, early: bool
) -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    if not early:
        leader.adopt(snapshots)
    leader.submit("r", prompt, output, delivered_chars=delivered_chars, expects=early)
    if early:
        leader.adopt(snapshots)
    assert leader.core.orphan_count == 0
    execute = leader.batch()
    assert execute is not None
    assert execute.batch.removed == (snapshots[0].sequence_id,)
    assert [s.token_ids for s in execute.batch.slices] == [(*prompt, *output)]


def test_a_request_without_text_and_logprobs_may_lack_tokens() -> None:
    old = Leader()
    old.feed(
        Submitted(
            at_s=old.at_s,
            key=SequenceKey(1, 1),
            request_id=RequestId("r"),
            attempt=1,
            prompt_token_ids=(1, 2, 3),
            sampling=greedy(20),
            wants_text=False,
        )
    )
    for _ in range(3):
        old.step()
    leader = Leader(ordinal=2)
    leader.adopt(old.hand_over())
    leader.feed(
        Submitted(
            at_s=leader.at_s,
            key=SequenceKey(1, 1),
            request_id=RequestId("r"),
            attempt=2,
            prompt_token_ids=(1, 2, 3),
            sampling=greedy(20),
            output_token_ids=(5,),
            wants_text=False,
        )
    )
    assert leader.heard(SequenceKey(1, 1)) == ([5, 5], "", None)


def test_an_orphan_that_has_ended_keeps_its_end_for_a_while() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    leader.adopt(snapshots)
    while leader.core.has_work:
        leader.step(6)
    assert reserved(leader) == 0
    key = leader.submit("r", output=(5, 5, 5))
    assert leader.heard(key) == ([6] * 17, TEXT * 17, Ending(key.handle, FinishReason.LENGTH))


@pytest.mark.parametrize("ended", [True, False])
def test_an_orphan_that_nobody_asks_for_is_dropped(ended: bool) -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    leader.adopt(snapshots)
    while ended and leader.core.has_work:
        leader.step(6)
    leader.at_s += 10.0
    leader.feed(Tick(leader.at_s))
    assert (leader.core.orphan_count, leader.core.sequence_ids, reserved(leader)) == (0, (), 0)
    key = leader.submit("r", output=(5, 5, 5))
    assert leader.heard(key)[0] == []


@pytest.mark.parametrize("ended", [True, False])
def test_an_orphan_that_moves_on_loses_nothing(ended: bool) -> None:
    _, snapshots = handed_over(steps=3)
    between = Leader(ordinal=2)
    between.adopt(snapshots)
    between.step(6)
    while ended and between.core.has_work:
        between.step(6)
    leader = Leader(ordinal=3)
    leader.adopt(between.hand_over(WorkerId("w3")))
    assert between.emits == []
    key = leader.submit("r", output=(5, 5, 5))
    tokens, text, ending = leader.heard(key)
    assert (tokens, text) == ([6] * (17 if ended else 1), TEXT * len(tokens))
    assert (ending is not None) == ended


def test_a_second_drop_finds_a_suspended_sequence_that_has_ended() -> None:
    _, snapshots = handed_over(steps=3)
    between = Leader(ordinal=2)
    key = between.submit("r", output=(5, 5, 5), expects=True)
    between.adopt(snapshots, travels=True)
    between.feed(Aborted(between.at_s, key))
    (gone,) = between.hand_over(WorkerId("w3"))
    assert (gone.gone, gone.suspended) == (True, True)
    leader = Leader(ordinal=3)
    leader.adopt((gone,), travels=True)
    assert (leader.core.sequence_ids, reserved(leader)) == ((), 2)
    leader.feed(KvLost(leader.at_s, gone.sequence_id))
    assert (reserved(leader), leader.book.used_count) == (0, 0)


def test_the_stop_matcher_goes_on_in_mid_word() -> None:
    old = Leader()
    old.submit(sampling=greedy(20, stop=("aba",)))  # the second token completes it
    old.step()
    (snapshot,) = old.hand_over()
    assert (snapshot.held_text, snapshot.emitted_chars) == ("ab", 0)
    leader = Leader(ordinal=2)
    leader.adopt((snapshot,))
    leader.step()
    key = leader.submit("r", output=(5,), sampling=greedy(20, stop=("aba",)), delivered_chars=0)
    assert leader.heard(key) == ([5], "", Ending(key.handle, FinishReason.STOP, "aba"))


def test_deadlines_and_seniority_are_told_in_seconds_not_in_instants() -> None:
    old = Leader(ordinal=5, max_running_count=1)
    old.submit("runs")
    old.submit("waits", deadline_at_s=old.at_s + 3.0)
    old.at_s += 2.0
    old.step()
    snapshots = old.hand_over()
    assert [s.age_s for s in snapshots] == [2.0, 2.0]
    assert snapshots[1].deadline_s == 1.0
    leader = Leader(ordinal=2, max_running_count=1)
    leader.submit("young", prompt=(1,))
    leader.at_s += 1.0
    leader.submit("younger")
    leader.adopt(snapshots)  # one place: the youngest of those that run has to wait again
    runs = leader.step()
    assert runs == [snapshots[0].sequence_id]
    assert leader.core.next_deadline_at_s == leader.at_s + 1.0
    leader.feed(Tick(leader.at_s + 1.0))
    assert snapshots[1].sequence_id not in leader.core.sequence_ids


def test_a_handover_that_comes_twice_is_taken_once() -> None:
    _, snapshots = handed_over()
    leader = Leader(ordinal=2)
    leader.adopt(snapshots)
    leader.adopt(snapshots)
    assert (leader.core.totals.adopted, leader.core.totals.stale_events) == (1, 1)


def test_kv_that_will_not_come_is_computed_again() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    leader.feed(Adopted(leader.at_s, snapshots, lost_ids=frozenset({snapshots[0].sequence_id})))
    execute = leader.batch()
    assert execute is not None
    assert execute.batch.removed == (snapshots[0].sequence_id,)
    assert execute.batch.slices[0].token_ids == (1, 2, 3, 5, 5, 5)


def test_the_later_of_two_dispatchers_that_wait_for_one_sequence_gets_it() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    earlier = leader.submit("r", output=(5,), expects=True)
    later = leader.submit("r", output=(5, 5, 5), expects=True)
    leader.adopt(snapshots)
    leader.step(6)
    assert leader.heard(later)[0] == [6]
    assert leader.heard(earlier)[0] == [6]  # resumed by itself: one token behind its own
