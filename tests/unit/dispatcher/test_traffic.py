from collections.abc import Callable, Sequence

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import RequestId
from ballast.common.traffic import Served, Traffic, read_traffic, served_between, sum_traffic, write_traffic
from services.dispatcher.core.traffic import TrafficCounter


def counted(arrivals: list[float], at_s: float) -> Traffic:
    counter = TrafficCounter()
    for arrived_at_s in arrivals:
        counter.arrived(RequestId("r"), arrived_at_s, 100, made_count=1)
    counter.check(set(), len(arrivals))
    return counter.read(at_s, 3, 40)


def test_a_steady_rate() -> None:
    found = counted([float(second) for second in range(400)], 399.9)
    assert (found.recent_count, found.minute_count, found.minute_tokens) == (10, 60, 6000)
    assert found.calm_per_s == 1.0
    assert found.known_s == 300.0
    assert (found.queued_count, found.queued_tokens) == (3, 40)


def test_a_burst_does_not_change_the_calm_rate() -> None:
    steady = [float(second) for second in range(300)]
    burst = [290.0 + i / 20 for i in range(200)]
    found = counted(sorted(steady + burst), 299.9)
    assert found.recent_count == 210
    assert found.calm_per_s == 1.0


def test_a_burst_that_lasts_most_of_the_history_does_not_change_the_calm_rate() -> None:
    """The cluster is two and a half minutes old, and during the last 100 s the rate was four times as high as
    before.
    """
    arrivals = [float(second) for second in range(50)] + [50.0 + i / 4 for i in range(400)]
    assert counted(arrivals, 149.9).calm_per_s == 1.0


def test_a_cluster_that_has_just_started_was_calm_before() -> None:
    found = counted([i / 20 for i in range(240)], 12.0)
    assert found.recent_count > 150
    assert found.calm_per_s == 0.0


def test_the_length_and_height_of_bursts_are_learnt_from_earlier_ones() -> None:
    """Bursts of six seconds every minute, at ten requests a second instead of one."""
    times = [i / 10 for i in range(3000) if i % 10 == 0 or 0 < i % 600 < 60]

    def told(arrivals: Sequence[float], at_s: float) -> tuple[float, ...]:
        found = counted([time for time in arrivals if time <= at_s], at_s)
        assert read_traffic(write_traffic(found)) == found
        return found.burst_since_s, found.burst_s, found.burst_per_s

    rate = pytest.approx(10.0, abs=0.2)
    assert told(times, 183.0) == (2.0, 6.0, rate)
    assert told(times, 185.0) == (4.0, 6.0, rate)
    assert told(times, 189.0) == (8.0, 6.0, rate), "the burst is over"
    assert told(times, 230.0) == told(times, 240.5) == (0.0,) * 3
    assert told([float(second) for second in range(300)], 300.0) == (0.0,) * 3, "there were no bursts"
    assert told(sorted([*times, *(240 + i / 10 for i in range(120))]), 252.0) == (0.0,) * 3, (
        "it lasts longer than the bursts before"
    )
    by_chance = sorted([*(3.0 * i for i in range(100)), 100.1, 100.2, 100.3, *(280 + i / 4 for i in range(40))])
    assert told(by_chance, 289.0) == (0.0,) * 3, "four requests in two seconds are no burst"
    both = sum_traffic([Traffic(burst_s=4.0, burst_per_s=2.0), Traffic(burst_per_s=1.0)])
    assert (both.burst_s, both.burst_per_s) == (4.0, 3.0)


def test_the_format_of_a_version_without_bursts_is_read() -> None:
    words = write_traffic(counted([1.0, 2.5], 12.5)).split(" ")
    assert read_traffic(" ".join([*words[:11], *words[14:]])) == counted([1.0, 2.5], 12.5)


def test_old_data_is_forgotten() -> None:
    counter = TrafficCounter()
    counter.arrived(RequestId("r"), 0.0, 10, made_count=1)
    counter.ended(1.0, 500)
    assert counter.read(2.0, 0, 0).ended_tokens == 500
    assert counter.read(299.0, 0, 0).ended_count == 1
    late = counter.read(400.0, 0, 0)
    assert (late.ended_count, late.minute_count, late.calm_per_s) == (0, 0, 0.0)
    assert late.is_idle


def test_long_prompts_are_distinguished_from_short_ones() -> None:
    counter = TrafficCounter()
    for i in range(100):
        counter.arrived(RequestId(f"r{i}"), i / 2, 8000 if i % 50 == 0 else 200)
    found = counter.read(50.0, 0, 0)
    assert found.prompt_quantile(0.5) == pytest.approx(200, rel=0.25)
    assert found.prompt_quantile(0.99) == pytest.approx(8000, rel=0.25)
    assert read_traffic(write_traffic(found)) == found
    assert sum_traffic([found, found]).prompt_quantile(0.99) == pytest.approx(8000, rel=0.25)
    assert counter.read(200.0, 0, 0).prompt_quantile(0.5) is None


def test_requests_are_reported_at_once_and_tokens_four_times_a_second() -> None:
    counter = TrafficCounter()
    one = RequestId("r")
    changes: list[Callable[[], None]] = [
        lambda: counter.arrived(one, 0.1, 10),
        lambda: counter.began(one, 0.2),
        lambda: counter.left(one, 1),
        lambda: counter.mark_long(one),
    ]
    for step, change in enumerate(changes):
        at_s = step / 10
        counter.read(at_s, 0, 0)
        assert not counter.carries_changes(at_s + 0.05, 0)
        assert counter.carries_changes(at_s + 0.05, 1), "a request is queued"
        change()
        assert counter.carries_changes(at_s + 0.05, 0)
    counter.read(1.0, 0, 0)
    counter.went_on(100, 1.0)
    assert not counter.carries_changes(1.2, 0)
    assert counter.carries_changes(1.25, 0)


def test_dispatchers_add_up() -> None:
    one, other = counted([1.0, 2.0], 12.0), counted([3.0], 12.0)
    both = sum_traffic([one, other])
    assert both.minute_count == 3
    assert both.queued_count == 6
    assert both.known_s == 11.0
    assert sum_traffic([]) == Traffic()


def test_a_report_survives_a_round_trip() -> None:
    traffic = counted([1.0, 2.5, 11.25], 12.5)
    assert read_traffic(write_traffic(traffic)) == traffic
    served = had([0.001, 0.7, 1e4], 3, 0.25)
    assert read_traffic(write_traffic(served)) == served
    assert served_between(traffic, served) == served_between(Traffic(), served)


def had(waits_s: list[float], later_count: int, took_s: float) -> Traffic:
    counter = TrafficCounter()
    for wait_s in waits_s:
        counter.arrived(RequestId("r"), 0.0, 1)
        counter.began(RequestId("r"), wait_s)
    counter.went_on(later_count, took_s)
    return counter.read(1.0, 0, 0)


def test_the_oldest_wait_is_that_of_the_first_request_without_a_token() -> None:
    counter = TrafficCounter()
    names = [RequestId(name) for name in "abc"]
    for second, name in enumerate(names):
        counter.arrived(name, float(second), 10)
    assert counter.read(5.0, 0, 0).oldest_wait_s == 5.0
    counter.began(names[0], 5.0)
    counter.left(names[1], 0)
    counter.left(names[0], 1)
    counter.check({names[2]}, 0)
    found = counter.read(5.5, 0, 0)
    assert found.oldest_wait_s == 3.5
    assert read_traffic(write_traffic(found)) == found
    assert sum_traffic([found, Traffic(oldest_wait_s=9.0)]).oldest_wait_s == 9.0
    counter.began(names[2], 6.0)
    assert counter.read(7.0, 0, 0).oldest_wait_s == 0.0


def test_tokens_of_running_answers_do_not_count_for_ended_ones() -> None:
    counter = TrafficCounter()
    long, short, taken_over = (RequestId(name) for name in ("long", "short", "over"))
    for name, made_count in ((long, 0), (short, 0), (taken_over, 70)):
        counter.arrived(name, 0.0, 10, made_count)
    counter.began(long, 1.0)
    counter.began(short, 1.0)
    counter.went_on(41, 2.0)  # output tokens of both requests together
    counter.left(short, 2)
    counter.ended(3.0, 2)
    counter.check(set(), 111)
    found = counter.read(4.0, 0, 0)
    assert (found.open_tokens, found.ended_tokens) == (111, 2)
    assert read_traffic(write_traffic(found)) == found
    assert sum_traffic([found, found]).open_tokens == 222
    with pytest.raises(InvariantViolation, match="110 tokens, but 111 were counted"):
        counter.check(set(), 110)


def test_served_between_compares_two_readings() -> None:
    before, more = had([100.0] * 50, 10, 100.0), had([1.0] * 98 + [3.0, 3.1], 20, 1.0)
    found = served_between(before, sum_traffic([before, more]))
    assert found is not None
    assert (found.first_count, found.tpot_s) == (100, 0.05)
    assert found.ttft_p99_s == pytest.approx(3.0, rel=0.25)
    assert served_between(before, more) is None, "the dispatcher of the first counts is gone"
    assert served_between(before, before) == Served(0, None, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 2",
        "1 2 3 4 5 6 7 8 nine 0 0 [] 0 0 []",
        "-1 0 0 0 0 0 0 0 0 0 0 [] 0 0 []",
        "0 0 0 0 0 nan 0 0 0 0 0 [] 0 0 []",
        "0 0 0 0 0 0 0 0 0 0 -1 [] 0 0 []",
        "0 0 0 0 0 0 0 0 -1 0 0 [] 0 0 []",
        "0 0 0 0 0 0 0 0 0 0 [] 0 0 []",
        "1" + "0" * 30 + " 0" * 10 + " [] 0 0 []",
        "0 0 0 0 0 0 0 0 0 0 0 [-1] 0 0 []",
        "0 0 0 0 0 0 0 0 0 0 0 [" + "1," * 60 + "] 0 0 []",
        "0 0 0 0 0 0 0 0 0 0 0 [] 0 0 [-1]",
        "0 0 0 0 0 0 0 0 0 0 0 [] 0 0 [" + "1," * 60 + "]",
    ],
)
def test_a_malformed_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - raised by int() or by unpacking
        read_traffic(text)
