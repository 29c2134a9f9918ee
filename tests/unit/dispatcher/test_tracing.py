"""Traces built from the recorded stories of requests."""

from collections.abc import Sequence
from dataclasses import replace

from ballast.common.ids import Epoch, GroupId, Incarnation, RequestId, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.service.otlp import Exporter, Span, transition_context
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
    stranded = [Moment(2.0, What.MOVING, 0, "a"), Moment(3.0, What.STRANDED, 0)]
    assert stays_of(stranded, 1.0, 4.0)[1:] == [Stay("between workers", "", 2.0, 3.0), Stay("backlog", "", 3.0, 4.0)]
    assert stays_of([], 1.0, 2.0) == [Stay("backlog", "", 1.0, 2.0)]


def test_a_request_without_a_trace_begins_one_and_a_failed_one_says_why() -> None:
    whole, *inner = spans_of(account(error="lost 4 times"), offset_s=1000.0)
    assert len(whole.at.trace_id) == 32
    assert (whole.parent_id, whole.begin_s, whole.end_s, whole.error) == ("", 1001.0, 1010.0, "lost 4 times")
    assert {span.parent_id for span in inner} == {whole.at.span_id}
    assert len(inner) == 5


class Kept(Exporter):
    """Stores spans instead of sending them."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, spans: Sequence[Span]) -> None:
        self.spans += spans


def test_only_sampled_traces_are_kept() -> None:
    exporter = Kept()
    tracer = Tracer(exporter, Clock(), lambda: 0.0)
    trace = "00-" + "a" * 32 + "-" + "b" * 16
    tracer.ended(account(f"{trace}-00"))
    assert not exporter.spans
    tracer.ended(account(f"{trace}-01"))
    assert {span.at.trace_id for span in exporter.spans} == {"a" * 32}
    assert spans_of(account("nonsense"), 0.0)[0].at.trace_id != "nonsense"


def layout(epoch: int, *layers: tuple[int, int]) -> Layout:
    members = [
        Member(WorkerId(name), Incarnation(1), f"{name}:1", first, last)
        for name, (first, last) in zip("abc", layers, strict=False)
    ]
    return Layout(Epoch(epoch), 4, tuple(Group(GroupId(m.worker_id), (m,)) for m in members), "overload")


def test_a_request_is_linked_only_to_the_drops_during_its_lifetime() -> None:
    now = [0.0]

    class Moving:
        def now_s(self) -> float:
            return now[0]

    exporter = Kept()
    tracer = Tracer(exporter, Moving(), lambda: 0.0)
    dropped = layout(3, (0, 2), (2, 4))
    tracer.layout(layout(1, (0, 4)))
    now[0] = 0.5
    tracer.layout(layout(2, (0, 4), (0, 4)))  # an instance joined: nothing was dropped
    now[0] = 3.5
    tracer.layout(dropped)
    now[0] = 11.0
    tracer.layout(layout(4, (0, 4), (0, 4)))  # restored after the request had ended
    tracer.ended(account())
    context = transition_context(dropped)
    assert exporter.spans[0].links == [context]
    assert context != transition_context(replace(dropped, epoch=Epoch(9)))
