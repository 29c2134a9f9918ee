from ballast.common.ids import Incarnation, WorkerId
from ballast.common.marks import MARK_TOKENS, first_mark, mark_after, marks_of
from services.dispatcher.core.prefix_map import PrefixMap
from services.dispatcher.policy.freeness import WorkerKey

A, B = (WorkerKey(WorkerId(name), Incarnation(1)) for name in "ab")
TOKENS = tuple(range(1000))


def test_marks_are_those_of_the_common_beginning() -> None:
    marks = marks_of(TOKENS)
    assert len(marks) == 3
    other = (*TOKENS[: 2 * MARK_TOKENS], *[7] * 400)
    assert marks_of(other)[:2] == marks[:2]
    assert marks_of(other)[2] != marks[2]
    assert not set(marks_of(TOKENS, b"salt")) & set(marks)
    assert mark_after(first_mark(b""), TOKENS[:MARK_TOKENS]) == marks[0]


def test_a_worker_holds_prefixes_used_since_its_last_eviction() -> None:
    known, marks = PrefixMap(most_marks=100), marks_of(TOKENS)
    known.report(A, 0.0)
    known.report(B, 0.0)
    known.note(A, marks, 1.0)
    known.note(B, marks[:1], 2.0)
    assert known.hits(marks) == {A: 768, B: 256}
    known.report(A, 1.5)
    assert known.hits(marks) == {B: 256}
    known.note(A, marks[:2], 3.0)
    assert known.hits(marks) == {A: 512, B: 256}
    known.forget(B)
    assert known.hits(marks) == {A: 512}
    assert known.hits(marks_of(TOKENS, b"salt")) == {}


def test_the_number_of_marks_is_bounded() -> None:
    known = PrefixMap(most_marks=3)
    known.report(A, 0.0)
    for mark in range(10):
        known.note(A, (mark,), float(mark))
        known.note(A, (0,), float(mark))
    known.check()
    assert len(known) == 3
    assert known.hits((0,)) == {A: MARK_TOKENS}
    assert known.hits((5,)) == {}


def test_the_number_of_workers_of_a_mark_is_bounded() -> None:
    """A system prompt's marks are always in use, and each restart of a worker makes a new incarnation."""
    known, lives = PrefixMap(most_marks=100), [WorkerKey(WorkerId("a"), Incarnation(n)) for n in range(10_000)]
    for life in lives:
        known.report(life, 0.0)
        known.note(life, (7,), 1.0)
        known.forget(lives[max(0, life.incarnation - 3)])
    assert set(known.hits((7,))) == set(lives[-3:])
    assert len(known._used[7]) < 100
