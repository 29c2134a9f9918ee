"""Traces made of what is remembered of requests."""

from ballast.common.ids import RequestId
from services.dispatcher.core.events import Facts
from services.dispatcher.core.story import Moment, What
from services.dispatcher.shell.chronicle import Account
from services.dispatcher.shell.tracing import Stay, Tracer, spans_of, stays_of


class Clock:
    def now_s(self) -> float:
        return 100.0


def account(traceparent: str = "", error: str = "") -> Account:
    facts = Facts(
        prompt_token_count=3,
        completion_token_count=5,
        replay_count=1,
        queue_s=1.0,
        ttft_s=2.0,
        e2e_s=9.0,
        arrived_at_s=1.0,
        traceparent=traceparent,
    )
    for moment in MOMENTS:
        facts.story.add(moment)
    return Account(request_id=RequestId("r"), state="stop", error=error, at_s=10.0, was_accepted=True, facts=facts)


MOMENTS = [
    Moment(1.0, What.WAITING, 0, detail="behind 2 others"),
    Moment(2.0, What.PLACED, 0, "a"),
    Moment(3.0, What.FIRST_TOKEN, 0, "a"),
    Moment(4.0, What.MOVED, 2, "b"),
    Moment(5.0, What.LOST, 3, "b", "connection reset"),
    Moment(7.0, What.PLACED, 3, "c"),
]


def test_stays_follow_one_another_from_arrival_to_end() -> None:
    assert stays_of(MOMENTS, 1.0, 10.0) == [
        Stay("backlog", "", 1.0, 2.0),
        Stay("on a", "a", 2.0, 4.0),
        Stay("on b", "b", 4.0, 5.0),
        Stay("backlog", "", 5.0, 7.0),
        Stay("on c", "c", 7.0, 10.0),
    ]
    assert stays_of([], 1.0, 2.0) == [Stay("backlog", "", 1.0, 2.0)]


def test_a_request_without_a_trace_begins_one_and_a_failed_one_says_why() -> None:
    whole, *inner = spans_of(account(error="lost 4 times"), offset_s=1000.0)
    assert len(whole["traceId"]) == 32
    assert "parentSpanId" not in whole
    assert whole["startTimeUnixNano"] == "1001000000000"
    assert whole["endTimeUnixNano"] == "1010000000000"
    assert whole["status"] == {"code": 2, "message": "lost 4 times"}
    assert {span["parentSpanId"] for span in inner} == {whole["spanId"]}
    assert len({span["spanId"] for span in (whole, *inner)}) == 6


def test_only_sampled_traces_are_kept_and_no_more_than_a_bound() -> None:
    tracer = Tracer("http://127.0.0.1:1", "d", Clock(), lambda: 0.0)
    trace = "00-" + "a" * 32 + "-" + "b" * 16
    tracer.ended(account(f"{trace}-00"))
    assert tracer.dropped_count == 0
    for _ in range(3000):
        tracer.ended(account(f"{trace}-01"))
    assert tracer.dropped_count == 3000 - 2048
    assert spans_of(account("nonsense"), 0.0)[0]["traceId"] != "nonsense"
