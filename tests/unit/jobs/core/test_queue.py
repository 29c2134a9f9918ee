"""The order in which the lines of batches are sent."""

import random
from collections import Counter

from services.jobs.core.lines import JobLine
from services.jobs.core.queue import Pick, Queue


def lines(count: int, first: int = 1) -> list[JobLine]:
    return [JobLine(number, f"l{number}", 0, 1) for number in range(first, first + count)]


def filled(**batches: tuple[str, int]) -> Queue:
    """A queue with these batches: name -> (API key, line count)."""
    queue = Queue(low=1)
    for name, (owner, count) in batches.items():
        queue.open(name, owner)
        queue.add(name, lines(count))
    return queue


def picks(queue: Queue, count: int) -> list[Pick]:
    found = [queue.pick(0.0) for _ in range(count)]
    return [pick for pick in found if pick is not None]


def test_a_keys_batches_alternate_and_their_lines_are_sent_in_order() -> None:
    queue = filled(a=("k", 3), b=("k", 2))
    got = [(pick.batch_id, pick.line.number) for pick in picks(queue, 9)]
    assert got == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3)]


def test_a_key_with_many_batches_has_no_more_in_flight_than_another() -> None:
    queue = filled(a=("many", 50), b=("many", 50), c=("many", 50), d=("few", 50))
    owners = Counter("few" if pick.batch_id == "d" else "many" for pick in picks(queue, 40))
    assert owners == {"many": 20, "few": 20}


def test_an_unused_share_goes_to_another_key() -> None:
    queue = filled(a=("many", 50), d=("few", 2))
    assert len(picks(queue, 40)) == 40


def test_a_retried_line_waits_and_then_precedes_others() -> None:
    queue = filled(a=("k", 3))
    [first] = picks(queue, 1)
    assert queue.in_flight("a") == 1
    queue.again(first, at_s=5.0)
    assert (queue.in_flight("a"), queue.next_s()) == (0, 5.0)
    assert [pick.line.number for pick in picks(queue, 1)] == [2]
    again = queue.pick(5.0)
    assert again is not None
    assert again.line.number == 1
    assert queue.next_s() is None


def test_lines_are_read_when_few_are_left() -> None:
    queue = Queue(low=2)
    queue.open("a", "k")
    assert queue.wants() == [("a", 0)]
    queue.add("a", lines(3))
    assert queue.wants() == []
    picks(queue, 2)
    assert queue.wants() == [("a", 3)]
    queue.add("a", [])
    assert queue.wants() == []
    queue.open("a", "k")  # opened twice: it keeps its position
    assert queue.wants() == []


def test_a_closed_batch_is_forgotten_with_its_share() -> None:
    queue = filled(a=("k", 3), b=("l", 9))
    taken = picks(queue, 2)
    queue.close("a")
    for pick in taken:
        queue.ended(pick)
    queue.again(taken[0], 1.0)
    queue.add("a", lines(3))
    assert {pick.batch_id for pick in picks(queue, 9)} == {"b"}
    assert queue.pick(9.0) is None


def test_random_histories_lose_no_line_and_send_none_twice() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        counts = {f"b{i}": draw.randrange(1, 30) for i in range(draw.randrange(1, 5))}
        stored: dict[str, set[int]] = {name: set(range(1, count + 1)) for name, count in counts.items()}
        queue = Queue(low=draw.randrange(1, 5))
        for name in counts:
            queue.open(name, draw.choice("xyz"))
        flying: list[Pick] = []
        now_s, done = 0.0, Counter[tuple[str, int]]()
        while any(stored.values()):
            now_s += 0.5
            for name, after in queue.wants():
                queue.add(
                    name,
                    [line for line in lines(counts[name]) if line.number in stored[name] and line.number > after][:4],
                )
            pick = queue.pick(now_s) if len(flying) < 6 else None
            if pick is not None:
                assert pick not in flying
                flying.append(pick)
            elif flying:
                pick = flying.pop(draw.randrange(len(flying)))
                if draw.random() < 0.3:
                    queue.again(pick, now_s + draw.random() * 3)
                else:
                    queue.ended(pick)
                    done[pick.batch_id, pick.line.number] += 1
                    stored[pick.batch_id].remove(pick.line.number)
        assert set(done.values()) == {1}
        assert len(done) == sum(counts.values())


def test_no_further_lines_are_read_while_many_wait_for_a_retry() -> None:
    queue, read = Queue(low=8), 0
    queue.open("a", "k")
    for _ in range(1000):  # gateways refuse every line for a minute
        for batch_id, after in queue.wants():
            read = after + 8
            queue.add(batch_id, lines(8, after + 1))
        for pick in picks(queue, 8):
            queue.again(pick, at_s=60.0)
    assert read == 512
    assert queue.pick(60.0) is not None
