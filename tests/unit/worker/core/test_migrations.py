"""Stories of a migrating sequence, seen from its source and from its target. Blocks have 4 tokens."""

import itertools
import random

import pytest

from ballast.common.ids import Epoch, RequestId, WorkerId
from ballast.common.sampling import PriorityClass, SamplingParams
from services.worker.core import migration_messages as m
from services.worker.core.arrivals import KvArrivals
from services.worker.core.departures import Departures
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.spans import Hop, KvRange, StageLayers, hops
from services.worker.policy.departure import Decoding, choose_departure
from tests.unit.worker.core.stories import driver, prompt

W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")
SEQUENCE, MIGRATION, EPOCH = 5, 77, Epoch(4)
GIVERS = (StageLayers(W1, 0, 8),)
TAKERS = (StageLayers(W2, 0, 8),)
PAIR = (StageLayers(W2, 0, 5), StageLayers(W3, 5, 8))


def give(*span: int, last: bool = False) -> m.Give:
    return m.Give(MIGRATION, SEQUENCE, EPOCH, KvRange(*span, last=last), TAKERS)


def hand_away(*span: int) -> m.HandOverNow:
    return m.HandOverNow(W2, give(*span, last=True))


def take(first_block: int, last_block: int) -> m.Take:
    return m.Take(MIGRATION, SEQUENCE, EPOCH, first_block, last_block, GIVERS)


def keep(token_count: int) -> m.Keep:
    return m.Keep(MIGRATION, SEQUENCE, token_count)


def offer(token_count: int, migration_id: int = MIGRATION) -> m.Offer:
    return m.Offer(migration_id, SEQUENCE, token_count, GIVERS)


OFFER = offer(22)


def want(first_block: int, last_block: int, takers: tuple[StageLayers, ...] = TAKERS) -> m.Want:
    return m.Want(MIGRATION, first_block, last_block, takers)


def snapshot(sequence_id: int, computed_tokens: int) -> SequenceSnapshot:
    return SequenceSnapshot(
        sequence_id=sequence_id,
        request_id=RequestId(f"r{sequence_id}"),
        computed_tokens=computed_tokens,
        checksum=0,
        token_count=computed_tokens + 1,
        priority=PriorityClass.DEFAULT,
        age_s=0.0,
    )


def leaving(token_count: int = 22) -> Departures:
    departures = Departures(4, 100)
    chosen = Decoding(SEQUENCE, 1, token_count, token_count // 4 + 1)
    (said,) = departures.begin(0.0, MIGRATION, W2, EPOCH, chosen, GIVERS)
    assert said == m.Say(W2, offer(token_count))
    return departures


def look(departures: Departures, at_s: float, token_count: int | None, *, in_flight: bool = False) -> list[object]:
    commands = departures.look(at_s, lambda _: token_count, lambda _: in_flight)
    departures.check()
    return list(commands)


def report(departures: Departures, commands: list[object]) -> m.Report:
    (found,) = [c for c in commands if isinstance(c, m.Report)]
    assert not len(departures)
    return found


def arrivals(room_blocks: int = 100) -> KvArrivals:
    return KvArrivals(4, lambda blocks, _: "" if blocks <= room_blocks else "full")


def copying() -> KvArrivals:
    """A migration for which five blocks have arrived and four more have been allocated."""
    coming = arrivals()
    assert offered(coming, 0.0) == [take(0, 8)]  # 23 tokens, and two blocks in reserve
    assert coming.ready(0.0, MIGRATION, W2) == [m.Say(W1, want(0, 8))]
    assert landed(coming, 0.1, KvRange(0, 5, 25)) == [take(5, 9)]
    assert coming.ready(0.1, MIGRATION, W2) == [m.Say(W1, want(5, 9))]
    coming.check()
    return coming


def offered(
    coming: KvArrivals, at_s: float, made: m.Offer = OFFER, why_not: str = "", takers: tuple[StageLayers, ...] = TAKERS
) -> list[object]:
    return list(coming.offered(at_s, W1, EPOCH, made, takers, why_not))


def landed(coming: KvArrivals, at_s: float, span: KvRange | None, stage: WorkerId = W2) -> list[object]:
    commands = coming.landed(at_s, MIGRATION, stage, span)
    coming.check()
    return list(commands)


# ---------------------------------------------------------------- the source


def test_whole_blocks_are_sent_ahead_and_the_rest_with_the_sequence() -> None:
    departures = leaving()
    assert look(departures, 0.1, 23) == []  # the target has not answered
    departures.heard(0.2, W2, want(0, 9))
    assert look(departures, 0.2, 24) == [give(0, 6, 24)]
    assert look(departures, 0.3, 25) == []
    departures.sent(0.3, MIGRATION, "")
    departures.heard(0.4, W2, want(6, 9))
    assert look(departures, 0.4, 27) == [hand_away(6, 7, 27)]
    assert departures.leaving == frozenset()
    done = report(departures, list(departures.heard(0.45, W2, m.Taken(MIGRATION, True))))
    assert (done.moved, done.with_kv, done.rounds, done.copied_blocks, done.last_blocks) == (True, True, 1, 6, 1)
    assert abs(done.downtime_s - 0.05) < 1e-9


def test_a_sequence_that_ends_or_is_preempted_ends_its_migration() -> None:
    departures = leaving()
    departures.heard(0.2, W2, want(0, 9))
    commands = look(departures, 0.3, None)
    assert isinstance(commands[0], m.Say)
    assert isinstance(commands[0].message, m.Off)
    assert not report(departures, commands).moved
    assert departures.heard(0.4, W2, want(0, 9)) == []  # too late


def test_a_preemption_and_readmission_between_two_steps_ends_the_migration() -> None:
    """Blocks whose KV is being sent were given to other sequences meanwhile."""

    def tokens(count: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)

    made = driver(12, block_tokens=4, admission_reserve_fraction=0.0, max_batch_tokens=64)
    made.submit(prompt(14), tokens(30))
    made.submit(prompt(14, 20), tokens(4))
    made.submit(prompt(9, 50), tokens(30))
    *_, sequence_id = made.core.sequence_ids
    departures = Departures(4, 100)
    departures.begin(0.0, MIGRATION, W2, EPOCH, Decoding(sequence_id, 1, 9, 3), GIVERS)
    commands = list[object]()
    for step in range(6):
        assert made.core.running_kv_tokens(sequence_id) is not None, "it seems to run all the time"
        commands += departures.look(made.at_s, made.core.running_kv_tokens, made.core.in_flight)
        if step == 1:
            departures.heard(made.at_s, W2, want(0, 9))
        made.want_batch()
        made.finish_step()
        if made.preempted:  # the second sequence ended in this step, so both blocks are free for the next plan
            made.submit(prompt(2, 70), tokens(4))
    assert isinstance(commands.pop(0), m.Give)
    assert not report(departures, commands).moved


def test_a_silent_target_is_abandoned() -> None:
    departures = leaving()
    assert look(departures, m.PATIENCE_S, 23) == []
    assert not report(departures, look(departures, m.PATIENCE_S + 0.1, 23)).moved


def test_duplicate_and_foreign_permissions_are_ignored() -> None:
    departures = leaving()
    departures.heard(0.2, W2, want(0, 9))
    look(departures, 0.2, 24)
    departures.heard(0.3, W2, want(0, 9))  # a duplicate
    departures.heard(0.3, W1, want(6, 9))  # from a worker that is not the target
    assert look(departures, 0.3, 25) == []
    assert departures.stale_total == 2


def test_a_sequence_that_grows_as_fast_as_it_is_copied_is_finally_stopped() -> None:
    departures, tokens, first = leaving(), 24, 0
    for at in range(40):
        departures.heard(at / 100, W2, want(first, tokens // 4 + 4))
        (command,) = look(departures, at / 100, tokens)
        if isinstance(command, m.HandOverNow):
            assert command.give.span == KvRange(first, tokens // 4, tokens, last=True)
            return
        assert isinstance(command, m.Give)
        first, tokens = command.span.last_block, tokens + 8
    raise AssertionError("the sequence was not handed over")


def test_a_last_span_that_cannot_be_sent_leaves_the_sequence_at_the_source() -> None:
    departures = leaving()
    departures.heard(0.2, W2, want(0, 9))
    look(departures, 0.2, 24)
    departures.heard(0.3, W2, want(6, 9))
    assert isinstance(look(departures, 0.4, 25)[0], m.HandOverNow)
    done = report(departures, list(departures.give_up(0.4, MIGRATION, "no link")))
    assert (done.moved, done.why) == (False, "no link")


# ---------------------------------------------------------------- the target


def test_a_sequence_runs_when_its_state_and_its_last_blocks_have_arrived_in_any_order() -> None:
    for state_first in (True, False):
        coming = copying()
        state, last = m.Handed(MIGRATION, snapshot(SEQUENCE, 26)), KvRange(5, 7, 26, last=True)
        if state_first:
            assert coming.heard(0.2, W1, state) == []
            commands = landed(coming, 0.2, last)
        else:
            assert landed(coming, 0.2, last) == []
            commands = coming.heard(0.2, W1, state)
        assert commands == [keep(26), m.Adopt(state.snapshot, 26), m.Say(W1, m.Taken(MIGRATION, True))]
        assert (coming.block_count, coming.running_count) == (0, 0)
        assert coming.heard(0.3, W1, state) == []  # a duplicate


def test_a_handover_is_predicted() -> None:
    """Shortly before a handover, prompts in a batch are limited, so that the sequence does not wait for a long step."""
    coming = arrivals()
    assert coming.prompt_limit_blocks(0.0) is None
    offered(coming, 1.0)
    assert coming.prompt_limit_blocks(1.0) == 1  # all five blocks may arrive at once
    assert coming.prompt_limit_blocks(1.15) is None  # the link is slow, so the handover is not expected yet
    landed(coming, 1.2, KvRange(0, 3, 23))
    assert coming.prompt_limit_blocks(1.2) is None  # two full blocks are still missing
    landed(coming, 1.3, KvRange(3, 5, 26))
    assert coming.prompt_limit_blocks(1.3) == 0
    assert coming.prompt_limit_blocks(1.7) == 1  # prompts have been limited for long enough
    landed(coming, 1.7, KvRange(5, 7, 26, last=True))
    assert coming.prompt_limit_blocks(1.7) == 1
    coming.heard(1.7, W1, m.Handed(MIGRATION, snapshot(SEQUENCE, 26)))
    assert coming.prompt_limit_blocks(1.7) is None
    offered(coming, 2.0, offer(7, MIGRATION + 1))
    assert coming.prompt_limit_blocks(2.0) == 0
    coming.give_up_all("the layout changes")
    assert coming.prompt_limit_blocks(2.0) is None


def test_a_migration_without_room_is_refused_before_any_transfer() -> None:
    (said,) = offered(arrivals(5), 0.0)
    assert said == m.Say(W1, m.Off(MIGRATION, "full"))
    (said,) = offered(arrivals(), 0.0, why_not="no time")
    assert said == m.Say(W1, m.Off(MIGRATION, "no time"))


def test_blocks_are_freed_once_no_transfer_writes_into_them() -> None:
    coming = copying()
    assert coming.heard(0.2, W1, m.Off(MIGRATION, "it has ended")) == [m.Stop(MIGRATION)]
    assert coming.block_count == 9
    assert landed(coming, 0.3, KvRange(5, 6, 26)) == [keep(0)]
    assert not len(coming)


def test_a_sequence_whose_last_blocks_do_not_arrive_is_recomputed() -> None:
    coming = copying()
    state = m.Handed(MIGRATION, snapshot(SEQUENCE, 26))
    coming.heard(0.2, W1, state)
    assert landed(coming, 0.3, None) == [
        keep(0),
        m.Adopt(state.snapshot, 0),
        m.Say(W1, m.Taken(MIGRATION, False)),
    ]


@pytest.mark.parametrize("span", [KvRange(4, 6, 26), KvRange(5, 10, 40), KvRange(5, 4, 26)])
def test_an_unexpected_span_ends_the_migration(span: KvRange) -> None:
    coming = copying()
    assert landed(coming, 0.3, span) == [keep(0), m.Say(W1, m.Off(MIGRATION, "its KV has not arrived"))]
    assert not len(coming)


def test_a_handed_over_sequence_is_adopted_even_if_the_target_has_abandoned_it() -> None:
    coming = copying()
    state = m.Handed(MIGRATION, snapshot(SEQUENCE, 26))
    assert m.Stop(MIGRATION) in coming.give_up_all("the layout changes")
    assert coming.heard(0.2, W1, state) == []  # a transfer into its blocks may still be under way
    assert landed(coming, 0.3, None)[:2] == [keep(0), m.Adopt(state.snapshot, 0)]
    coming = copying()
    coming.give_up_all("the layout changes")
    assert landed(coming, 0.3, None) == [keep(0)]
    assert coming.heard(0.2, W1, state) == [m.Adopt(state.snapshot, 0)]
    assert coming.heard(0.2, W1, state) == []


# ---------------------------------------------------------------- groups of several stages


def test_stages_exchange_the_layers_that_they_have_in_common() -> None:
    """Every layer is sent once, from the stage that has it to the stage that will have it."""
    assert hops(GIVERS, PAIR) == [Hop(W1, W2, 0, 5), Hop(W1, W3, 5, 8)]
    assert hops(PAIR, GIVERS) == [Hop(W2, W1, 0, 5), Hop(W3, W1, 5, 8)]
    for seed in range(300):
        rng = random.Random(seed)
        sides = [_cut(rng, name) for name in "ab"]
        found = hops(*sides)
        for layer in range(12):
            ends = [next(s.worker_id for s in side if s.first_layer <= layer < s.last_layer) for side in sides]
            assert [(hop.giver, hop.taker) for hop in found if hop.first_layer <= layer < hop.last_layer] == [
                (ends[0], ends[1])
            ]


def _cut(rng: random.Random, name: str) -> list[StageLayers]:
    borders = [0, *sorted(rng.sample(range(1, 12), rng.randint(0, 3))), 12]
    return [StageLayers(WorkerId(f"{name}{i}"), *ends) for i, ends in enumerate(itertools.pairwise(borders))]


def test_a_sequence_whose_last_token_is_in_flight_is_not_handed_over_yet() -> None:
    departures = leaving(3)
    departures.heard(0.2, W2, want(0, 4))
    assert look(departures, 0.2, 3, in_flight=True) == []
    assert look(departures, 0.3, 4) == [hand_away(0, 1, 4)]


def to_a_pair() -> KvArrivals:
    coming = arrivals()
    assert offered(coming, 0.0, takers=PAIR) == [take(0, 8)]
    assert coming.ready(0.1, MIGRATION, W2) == []
    return coming


def test_the_source_is_notified_once_all_stages_have_blocks_and_once_all_have_their_layers() -> None:
    coming = to_a_pair()
    assert coming.ready(0.1, MIGRATION, W3) == [m.Say(W1, want(0, 8, PAIR))]
    assert landed(coming, 0.2, KvRange(0, 5, 25), W3) == []
    assert landed(coming, 0.2, KvRange(0, 5, 25), W3) == []  # a duplicate: it has reported this already
    assert landed(coming, 0.3, KvRange(0, 5, 25), W2) == [take(5, 9)]
    for stage in (W2, W3):
        coming.ready(0.3, MIGRATION, stage)
    state, last = m.Handed(MIGRATION, snapshot(SEQUENCE, 26)), KvRange(5, 7, 26, last=True)
    assert landed(coming, 0.4, last, W2) == []
    assert coming.heard(0.4, W1, state) == []
    assert landed(coming, 0.4, last, W3) == [keep(26), m.Adopt(state.snapshot, 26), m.Say(W1, m.Taken(MIGRATION, True))]


def test_a_stage_without_room_ends_the_migration_once_no_stage_is_written_to() -> None:
    """If the sequence has not been handed over yet, it continues at the source; otherwise it is recomputed."""
    coming = to_a_pair()
    assert landed(coming, 0.1, None, W3) == [m.Stop(MIGRATION)]  # W3 has no room
    assert coming.block_count == 8
    commands = landed(coming, 0.2, None, W2)
    assert commands[0] == keep(0)
    assert isinstance(commands[1], m.Say)
    assert isinstance(commands[1].message, m.Off)
    coming, state = to_a_pair(), m.Handed(MIGRATION, snapshot(SEQUENCE, 26))
    coming.ready(0.1, MIGRATION, W3)
    coming.heard(0.2, W1, state)
    assert landed(coming, 0.2, None, W2) == [m.Stop(MIGRATION)]
    assert landed(coming, 0.3, KvRange(0, 7, 26, last=True), W3) == [  # it arrived before the order to stop
        keep(0),
        m.Adopt(state.snapshot, 0),
        m.Say(W1, m.Taken(MIGRATION, False)),
    ]


def test_a_lost_group_returns_only_sequences_that_were_not_handed_over() -> None:
    coming, state = to_a_pair(), m.Handed(MIGRATION, snapshot(SEQUENCE, 26))
    assert coming.abandon("w3 is gone") == [m.Say(W1, m.Off(MIGRATION, "w3 is gone"))]
    assert landed(coming, 0.2, KvRange(0, 5, 25), W2) == []  # a transfer for the lost group
    coming = to_a_pair()
    coming.ready(0.1, MIGRATION, W3)
    coming.heard(0.2, W1, state)
    assert coming.abandon("w3 is gone") == []  # the dispatcher replays it
    assert coming.heard(0.3, W1, state) == []


# ---------------------------------------------------------------- which sequence to migrate


def test_the_shortest_of_the_lowest_class_goes_first() -> None:
    candidates = [Decoding(1, 1, 10, 3), Decoding(2, 2, 90, 23), Decoding(3, 2, 40, 10)]
    assert choose_departure(candidates, 100) == candidates[2]
    assert choose_departure(candidates, 5) == candidates[0]
    assert choose_departure(candidates, 100, leaving={3}) == candidates[1]
    assert choose_departure(candidates, 2) is None


def test_the_longest_sequence_goes_first_if_memory_is_short() -> None:
    candidates = [Decoding(1, 1, 10, 3), Decoding(2, 2, 90, 23), Decoding(3, 2, 40, 10)]
    assert choose_departure(candidates, 100, longest=True) == candidates[1]
    assert choose_departure(candidates, 16, longest=True) == candidates[1], "may exceed the block budget by half"
    assert choose_departure(candidates, 15, longest=True) == candidates[2]
