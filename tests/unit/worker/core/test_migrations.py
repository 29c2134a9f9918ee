"""Stories of a sequence that moves: what its source and its target make of it. Blocks of 4 tokens."""

from ballast.common.ids import RequestId, WorkerId
from ballast.common.sampling import PriorityClass, SamplingParams
from services.worker.core.arrivals import Arrivals
from services.worker.core.departures import Departures
from services.worker.core.migration_messages import (
    PATIENCE_S,
    Adopt,
    DropOrphan,
    Expect,
    HandAway,
    Handed,
    Off,
    Offer,
    Release,
    Report,
    Say,
    SendSpan,
    Span,
    StopExpecting,
    Taken,
    Want,
    Withdrawn,
)
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.policy.departure import Decoding, choose_departure

W1, W2 = WorkerId("w1"), WorkerId("w2")
SEQUENCE, MIGRATION = 5, 77


def snapshot(sequence_id: int, computed_tokens: int) -> SequenceSnapshot:
    return SequenceSnapshot(
        sequence_id=sequence_id,
        request_id=RequestId(f"r{sequence_id}"),
        attempt=1,
        priority=PriorityClass.DEFAULT,
        age_s=0.0,
        deadline_s=None,
        prompt_token_ids=(7,) * computed_tokens,
        output_token_ids=(7,),
        sampling=SamplingParams(seed=1),
        wants_text=False,
        computed_tokens=computed_tokens,
        on_stages=True,
        suspended=False,
        gone=False,
        held_text="",
        skip_chars=0,
        passed_chars=0,
        emitted_token_count=1,
        emitted_chars=0,
        unsent_text="",
        unsent_logprobs=(),
        finish_reason=None,
        matched_stop="",
        error="",
        invalid=False,
    )


def leaving(token_count: int = 22) -> Departures:
    departures = Departures(4, 100)
    (said,) = departures.begin(0.0, MIGRATION, SEQUENCE, W2, token_count)
    assert said == Say(W2, Offer(MIGRATION, SEQUENCE, token_count))
    return departures


def look(departures: Departures, at_s: float, token_count: int | None) -> list[object]:
    commands = departures.look(at_s, lambda _: token_count)
    departures.check()
    return list(commands)


def report(departures: Departures, commands: list[object]) -> Report:
    (found,) = [c for c in commands if isinstance(c, Report)]
    assert not len(departures)
    return found


def arrivals(room_blocks: int = 100) -> Arrivals:
    return Arrivals(4, lambda blocks, _: "" if blocks <= room_blocks else "full")


def copying() -> Arrivals:
    """Five blocks have come, and there is room for four more."""
    coming = arrivals()
    expect, want = coming.offered(0.0, W1, Offer(MIGRATION, SEQUENCE, 22), "")
    assert expect == Expect(MIGRATION, SEQUENCE, W1, 0, 8)  # 23 tokens and two blocks to spare
    assert want == Say(W1, Want(MIGRATION, 0, 8))
    expect, want = coming.landed(0.1, MIGRATION, Span(0, 5, 25))
    assert expect == Expect(MIGRATION, SEQUENCE, W1, 5, 9)
    assert want == Say(W1, Want(MIGRATION, 5, 9))
    coming.check()
    return coming


# ---------------------------------------------------------------- the source


def test_whole_blocks_go_ahead_and_the_rest_with_the_sequence() -> None:
    departures = leaving()
    assert look(departures, 0.1, 23) == []  # the target has not answered
    departures.heard(0.2, W2, Want(MIGRATION, 0, 9))
    assert look(departures, 0.2, 24) == [SendSpan(MIGRATION, SEQUENCE, W2, Span(0, 6, 24))]
    assert look(departures, 0.3, 25) == []
    departures.sent(0.3, MIGRATION, "")
    departures.heard(0.4, W2, Want(MIGRATION, 6, 9))
    assert look(departures, 0.4, 27) == [HandAway(MIGRATION, SEQUENCE, W2, Span(6, 7, 27, last=True))]
    assert departures.leaving == frozenset()
    done = report(departures, list(departures.heard(0.45, W2, Taken(MIGRATION, True))))
    assert (done.moved, done.with_kv, done.rounds, done.copied_blocks, done.last_blocks) == (True, True, 1, 6, 1)
    assert abs(done.downtime_s - 0.05) < 1e-9


def test_a_sequence_that_ends_or_gives_way_ends_its_migration() -> None:
    departures = leaving()
    departures.heard(0.2, W2, Want(MIGRATION, 0, 9))
    commands = look(departures, 0.3, None)
    assert isinstance(commands[0], Say)
    assert isinstance(commands[0].message, Off)
    assert not report(departures, commands).moved
    assert departures.heard(0.4, W2, Want(MIGRATION, 0, 9)) == []  # too late


def test_a_target_that_says_nothing_is_given_up() -> None:
    departures = leaving()
    assert look(departures, PATIENCE_S, 23) == []
    assert not report(departures, look(departures, PATIENCE_S + 0.1, 23)).moved


def test_leave_that_was_given_before_is_no_leave() -> None:
    departures = leaving()
    departures.heard(0.2, W2, Want(MIGRATION, 0, 9))
    look(departures, 0.2, 24)
    departures.heard(0.3, W2, Want(MIGRATION, 0, 9))  # the same once more
    departures.heard(0.3, W1, Want(MIGRATION, 6, 9))  # of somebody else
    assert look(departures, 0.3, 25) == []
    assert departures.stale_total == 2


def test_a_sequence_that_grows_as_fast_as_it_is_copied_stands_still_at_last() -> None:
    departures, tokens, first = leaving(), 24, 0
    for at in range(40):
        departures.heard(at / 100, W2, Want(MIGRATION, first, tokens // 4 + 4))
        (command,) = look(departures, at / 100, tokens)
        if isinstance(command, HandAway):
            assert command.span == Span(first, tokens // 4, tokens, last=True)
            return
        assert isinstance(command, SendSpan)
        first, tokens = command.span.last_block, tokens + 8
    raise AssertionError("never")


def test_a_last_span_that_cannot_be_sent_leaves_the_sequence_here() -> None:
    departures = leaving()
    departures.heard(0.2, W2, Want(MIGRATION, 0, 9))
    look(departures, 0.2, 24)
    departures.heard(0.3, W2, Want(MIGRATION, 6, 9))
    assert isinstance(look(departures, 0.4, 25)[0], HandAway)
    done = report(departures, list(departures.give_up(0.4, MIGRATION, "no link")))
    assert (done.moved, done.why) == (False, "no link")
    assert departures.withdraw(SEQUENCE) == []


def test_a_client_that_withdraws_too_late_is_told_to_the_target() -> None:
    departures = leaving(3)
    departures.heard(0.2, W2, Want(MIGRATION, 0, 4))
    assert isinstance(look(departures, 0.2, 3)[0], HandAway)
    assert departures.withdraw(SEQUENCE) == [Say(W2, Withdrawn(MIGRATION))]
    assert departures.withdraw(SEQUENCE) == []


# ---------------------------------------------------------------- the target


def test_a_sequence_runs_when_its_state_and_its_last_blocks_are_here_whichever_comes_first() -> None:
    for state_first in (True, False):
        coming = copying()
        state, last = Handed(MIGRATION, snapshot(SEQUENCE, 26)), Span(5, 7, 26, last=True)
        if state_first:
            assert coming.heard(0.2, W1, state) == []
            commands = coming.landed(0.2, MIGRATION, last)
        else:
            assert coming.landed(0.2, MIGRATION, last) == []
            commands = coming.heard(0.2, W1, state)
        assert commands == [Adopt(state.snapshot, 26), Say(W1, Taken(MIGRATION, True))]
        assert (coming.block_count, coming.running_count) == (0, 0)
        assert coming.heard(0.3, W1, state) == []  # the same once more


def test_a_hand_over_is_foreseen() -> None:
    """No step with much of a prompt in it is to begin that the sequence would have to wait for."""
    coming = arrivals()
    assert coming.prompt_limit_blocks(0.0) is None
    coming.offered(1.0, W1, Offer(MIGRATION, SEQUENCE, 22), "")
    assert coming.prompt_limit_blocks(1.0) == 1  # all five blocks may come at once
    assert coming.prompt_limit_blocks(1.15) is None  # the link is slow
    coming.landed(1.2, MIGRATION, Span(0, 3, 23))
    assert coming.prompt_limit_blocks(1.2) is None  # two whole blocks are missing
    coming.landed(1.3, MIGRATION, Span(3, 5, 26))
    assert coming.prompt_limit_blocks(1.3) == 0
    assert coming.prompt_limit_blocks(1.7) == 1  # prompts have waited for long enough
    coming.landed(1.7, MIGRATION, Span(5, 7, 26, last=True))
    assert coming.prompt_limit_blocks(1.7) == 1
    coming.heard(1.7, W1, Handed(MIGRATION, snapshot(SEQUENCE, 26)))
    assert coming.prompt_limit_blocks(1.7) is None
    coming.offered(2.0, W1, Offer(MIGRATION + 1, SEQUENCE, 7), "")
    assert coming.prompt_limit_blocks(2.0) == 0
    coming.give_up_all("the layout changes")
    assert coming.prompt_limit_blocks(2.0) is None


def test_what_has_no_room_is_refused_before_anything_moves() -> None:
    (said,) = arrivals(5).offered(0.0, W1, Offer(MIGRATION, SEQUENCE, 22), "")
    assert said == Say(W1, Off(MIGRATION, "full"))
    (said,) = arrivals().offered(0.0, W1, Offer(MIGRATION, SEQUENCE, 22), "no time")
    assert said == Say(W1, Off(MIGRATION, "no time"))


def test_blocks_are_free_when_nothing_is_written_into_them_any_more() -> None:
    coming = copying()
    assert coming.heard(0.2, W1, Off(MIGRATION, "it has ended")) == [StopExpecting(MIGRATION)]
    assert coming.block_count == 9
    assert coming.landed(0.3, MIGRATION, Span(5, 6, 26)) == [Release(SEQUENCE)]
    assert not len(coming)


def test_a_sequence_whose_last_blocks_do_not_come_is_computed_anew() -> None:
    coming = copying()
    state = Handed(MIGRATION, snapshot(SEQUENCE, 26))
    coming.heard(0.2, W1, state)
    assert coming.landed(0.3, MIGRATION, None) == [
        Release(SEQUENCE),
        Adopt(state.snapshot, 0),
        Say(W1, Taken(MIGRATION, False)),
    ]


def test_a_sequence_that_was_handed_over_is_taken_even_if_the_target_has_given_up() -> None:
    coming = copying()
    state = Handed(MIGRATION, snapshot(SEQUENCE, 26))
    assert StopExpecting(MIGRATION) in coming.give_up_all("the layout changes")
    assert coming.heard(0.2, W1, state) == []  # something may yet be written into its blocks
    assert coming.quiet(MIGRATION)[:2] == [Release(SEQUENCE), Adopt(state.snapshot, 0)]
    coming = copying()
    coming.give_up_all("the layout changes")
    assert coming.quiet(MIGRATION) == [Release(SEQUENCE)]
    assert coming.heard(0.2, W1, state) == [Adopt(state.snapshot, 0)]
    assert coming.heard(0.2, W1, state) == []


def test_a_withdrawn_sequence_is_dropped_before_and_after_it_was_taken() -> None:
    coming = copying()
    assert coming.heard(0.2, W1, Withdrawn(MIGRATION)) == [StopExpecting(MIGRATION)]
    assert coming.quiet(MIGRATION) == [Release(SEQUENCE)]
    coming = copying()
    coming.heard(0.2, W1, Handed(MIGRATION, snapshot(SEQUENCE, 26)))
    coming.landed(0.2, MIGRATION, Span(5, 7, 26, last=True))
    assert coming.heard(0.3, W1, Withdrawn(MIGRATION)) == [DropOrphan(SEQUENCE)]
    assert coming.heard(0.3, W1, Withdrawn(MIGRATION)) == []


# ---------------------------------------------------------------- who goes


def test_the_shortest_of_the_lowest_class_goes_first() -> None:
    candidates = [Decoding(1, 1, 10, 3), Decoding(2, 2, 90, 23), Decoding(3, 2, 40, 10)]
    assert choose_departure(candidates, 100) == candidates[2]
    assert choose_departure(candidates, 5) == candidates[0]
    assert choose_departure(candidates, 100, leaving={3}) == candidates[1]
    assert choose_departure(candidates, 2) is None
