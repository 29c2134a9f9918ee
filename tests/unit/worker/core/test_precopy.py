"""Stories of one member that copies KV ahead of a restore: blocks of 4 tokens, one other stage, w1."""

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.transition import TransitionKind
from services.worker.core.batch import Batch, Slice
from services.worker.core.plan import Plan
from services.worker.core.precopy import Precopy, Source, Span, sources_of

W1, W2 = WorkerId("w1"), WorkerId("w2")


def member(max_blocks: int = 8, *names: WorkerId) -> Precopy:
    return Precopy(tuple(Source(name, 2, 4) for name in names or (W1,)), 4, max_blocks)


def run(core: Precopy, step_id: int, *slices: tuple[int, int, int], removed: tuple[int, ...] = ()) -> None:
    """Slices as (sequence, first position, tokens)."""
    batch = Batch(step_id, removed, (), tuple(Slice(i, first, (7,) * count, True) for i, first, count in slices))
    core.begins(batch)
    core.ran(batch)
    core.check()


def test_blocks_are_asked_for_until_nearly_all_are_here() -> None:
    core = member()
    run(core, 1, (5, 0, 22))
    assert core.wants() == []  # nobody has said that it comes here
    core.share([5])
    assert not core.converged
    assert core.wants() == [(W1, Span(5, 0, 5))]
    assert core.wants() == []  # asked already
    assert core.landed(W1, Span(5, 0, 5), 1)
    assert core.converged
    assert core.copied_blocks(5, W1) == 5
    run(core, 2, (5, 22, 5))
    assert core.wants() == []  # one block is left to the commit
    run(core, 3, (5, 27, 1))
    assert core.wants() == [(W1, Span(5, 5, 7))]


def test_a_large_sequence_comes_in_several_answers() -> None:
    core = member(3)
    run(core, 1, (5, 0, 40))
    core.share([5])
    assert core.wants() == [(W1, Span(5, 0, 3))]
    assert core.landed(W1, Span(5, 0, 3), 1)
    assert core.wants() == [(W1, Span(5, 3, 6))]


def test_every_source_is_asked_two_questions_at_once() -> None:
    core = member(8, W1, W2)
    run(core, 1, *((i, 0, 12) for i in (1, 2, 3)))
    core.share([1, 2, 3])
    assert [(source, span.sequence_id) for source, span in core.wants()] == [(W1, 1), (W1, 2), (W2, 1), (W2, 2)]
    assert core.landed(W1, Span(1, 0, 3), 1)
    assert [(source, span.sequence_id) for source, span in core.wants()] == [(W1, 3)]
    assert not core.converged


def test_a_source_that_is_behind_gives_what_it_has_and_is_asked_again_after_the_next_batch() -> None:
    core, source = member(), member()
    for core_, tokens in ((core, 22), (source, 9)):
        run(core_, 1, (5, 0, tokens))
    core.share([5])
    [(_, wanted)] = core.wants()
    offered, step_id = source.offer(wanted)
    assert (offered, step_id) == (Span(5, 0, 2), 1)
    assert core.landed(W1, offered, step_id)
    assert core.wants() == []
    run(core, 2, (5, 22, 1))
    assert core.wants() == [(W1, Span(5, 2, 5))]


def test_what_a_source_does_not_know_it_offers_nothing_of() -> None:
    assert member().offer(Span(5, 2, 4)) == (Span(5, 2, 2), 0)


def test_a_preempted_sequence_forgets_what_was_copied() -> None:
    core = member()
    run(core, 1, (5, 0, 12))
    core.share([5])
    core.wants()
    assert core.landed(W1, Span(5, 0, 3), 1)
    run(core, 2, removed=(5,))
    assert core.copied_blocks(5, W1) == 0
    run(core, 3, (5, 0, 13))
    assert core.wants() == [(W1, Span(5, 0, 3))]


def test_blocks_of_a_sequence_that_has_gone_are_not_written_to() -> None:
    core = member()
    run(core, 1, (5, 0, 12))
    core.share([5])
    core.wants()
    run(core, 2, removed=(5,))
    assert not core.landed(W1, Span(5, 0, 3), 1)
    assert core.converged


def test_an_answer_read_in_an_earlier_life_is_not_taken() -> None:
    """The source may have given the blocks to another sequence while they were sent."""
    core = member()
    run(core, 1, (5, 0, 12))
    core.share([5])
    core.wants()
    run(core, 2, (6, 0, 8), removed=(5,))
    run(core, 3, (5, 0, 16))
    assert not core.landed(W1, Span(5, 0, 3), 2)
    assert core.wants() == []
    run(core, 4, (5, 16, 1))
    assert core.wants() == [(W1, Span(5, 0, 4))]
    assert core.landed(W1, Span(5, 0, 4), 3)


def test_an_answer_that_goes_beyond_the_present_life_is_not_taken() -> None:
    core = member()
    run(core, 1, (5, 0, 12))
    core.share([5])
    core.wants()
    run(core, 2, removed=(5,))
    run(core, 3, (5, 0, 8))
    assert not core.landed(W1, Span(5, 0, 3), 4)


def test_an_answer_for_which_there_is_no_place_any_more_is_not_taken() -> None:
    """The sequence gave way while it was on its way, and came back to blocks that not all layers have."""
    room = {5: 3}
    core = Precopy((Source(W1, 2, 4),), 4, 8, lambda sequence_id: room[sequence_id])
    run(core, 1, (5, 0, 22))
    core.share([5])
    assert core.wants() == [(W1, Span(5, 0, 3))], "no more than there is a place for"
    room[5] = 1
    run(core, 2, removed=(5,))
    run(core, 3, (5, 0, 22))
    assert not core.landed(W1, Span(5, 0, 3), 4)
    room[5] = 6
    run(core, 4)
    assert core.wants() == [(W1, Span(5, 0, 5))]
    assert core.landed(W1, Span(5, 0, 5), 4)


def test_what_failed_is_asked_for_again() -> None:
    core = member()
    run(core, 1, (5, 0, 12))
    core.share([5])
    core.wants()
    core.failed(W1, 5)
    assert core.wants() == []
    run(core, 2, (5, 12, 1))
    assert core.wants() == [(W1, Span(5, 0, 3))]


def test_the_first_round_is_about_who_was_there() -> None:
    core = member()
    run(core, 1, (5, 0, 12))
    core.share([5])
    core.wants()
    run(core, 2, (6, 0, 40))
    core.share([6])
    assert not core.converged
    assert core.landed(W1, Span(5, 0, 3), 1)
    assert core.converged
    assert core.wants() == [(W1, Span(6, 0, 8))]


def test_after_the_commit_nothing_is_asked_and_what_is_copied_stays() -> None:
    core = member()
    run(core, 1, (5, 0, 12), (6, 0, 12))
    core.share([5, 6])
    core.wants()
    assert core.landed(W1, Span(5, 0, 3), 1)
    core.end()
    assert not core.landed(W1, Span(6, 0, 3), 1)
    assert core.wants() == []
    assert (core.copied_blocks(5, W1), core.copied_blocks(6, W1)) == (3, 0)


def test_an_answer_to_another_question_is_a_bug() -> None:
    core = member()
    run(core, 1, (5, 0, 12))
    core.share([5])
    core.wants()
    with pytest.raises(InvariantViolation, match="asked for"):
        core.landed(W1, Span(5, 1, 3), 1)


def test_only_who_leaves_a_pipeline_copies_ahead() -> None:
    def layout(epoch: int, *groups: tuple[tuple[str, int, int], ...]) -> Layout:
        made = [
            Group(GroupId(g[0][0]), tuple(Member(WorkerId(w), Incarnation(1), "", a, b) for w, a, b in g))
            for g in groups
        ]
        return Layout(Epoch(epoch), 4, tuple(made), "test")

    pipeline, alone = (("w0", 0, 2), ("w1", 2, 4)), ((("w0", 0, 4),), (("w1", 0, 4),))
    restore = Plan(TransitionKind.RESTORE, layout(1, pipeline), layout(2, *alone))
    assert sources_of(restore, WorkerId("w0")) == (Source(W1, 2, 4),)
    assert sources_of(restore, W1) == (Source(WorkerId("w0"), 0, 2),)
    assert sources_of(Plan(TransitionKind.DROP, layout(1, *alone), layout(2, pipeline)), W1) == ()
    assert sources_of(Plan(TransitionKind.RESTORE, layout(1, *alone), layout(2, *alone)), W1) == ()
