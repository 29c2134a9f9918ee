"""Traces of requests, built from their histories when they end.

A request has a span, with child spans for each stay on a worker and each wait in between, and an event for each first
token after a change. Workers add spans to the same trace. Drops and restores during a request are linked to the
planner's spans. Tracing costs no time while tokens are generated.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ballast.common.clock import Clock
from ballast.common.ids import WorkerId
from ballast.common.layout import Layout
from ballast.service.otlp import Context, Exporter, Span, SpanEvent, transition_context
from services.dispatcher.core.story import Moment, What
from services.dispatcher.shell.chronicle import Account

_REMEMBERED: Final = 64  # maximum number of remembered changes of the layout
_ON_WORKER: Final = (What.PLACED, What.MOVED)
_OFF_WORKER: Final = (What.LOST, What.SENT_BACK, What.RECALLED, What.MOVING, What.STRANDED)


@dataclass(frozen=True, slots=True)
class Stay:
    """An interval of a request in one place, on the dispatcher's clock."""

    name: str
    worker_id: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the layout; `worker_ids`: the workers whose layers changed."""

    at_s: float
    context: Context
    worker_ids: frozenset[str]


class Tracer:
    """Builds and sends spans. `wall_s`: wall-clock time, for collectors."""

    def __init__(self, exporter: Exporter, clock: Clock, wall_s: Callable[[], float]) -> None:
        self._exporter = exporter
        self._clock = clock
        self._wall_s = wall_s
        self._held: dict[WorkerId, tuple[int, int]] = {}
        self._changes: deque[Change] = deque(maxlen=_REMEMBERED)

    def layout(self, layout: Layout) -> None:
        """Record a new layout if it changes which layers workers hold."""
        before = self._held
        self._held = {m.worker_id: (m.first_layer, m.last_layer) for group in layout.groups for m in group.members}
        changed = {w for w, layers in self._held.items() if before.get(w, layers) != layers}
        if changed:
            self._changes.append(Change(self._clock.now_s(), transition_context(layout), frozenset(changed)))

    def ended(self, account: Account) -> None:
        """Export the spans of an ended request, unless its trace is not sampled."""
        context = Context.read(account.facts.traceparent)
        if context is not None and not context.sampled:
            return  # the sender of the traceparent has decided against recording
        changes = tuple(self._changes)
        offset_s = self._wall_s() - self._clock.now_s()
        self._exporter.put(spans_of(account, offset_s, changes))


def spans_of(account: Account, offset_s: float, changes: Sequence[Change] = ()) -> list[Span]:
    """Spans of one request. `offset_s`: wall-clock time minus the dispatcher's clock."""
    facts = account.facts
    caller = Context.read(facts.traceparent) or Context.new()
    own = caller.request(account.request_id)
    end_s = facts.arrived_at_s + facts.e2e_s
    stays = stays_of(facts.story.moments, facts.arrived_at_s, end_s)
    seen = {stay.worker_id for stay in stays if stay.worker_id}
    lived = [one.context for one in changes if facts.arrived_at_s < one.at_s < end_s and one.worker_ids & seen]

    whole = Span(
        "request",
        own,
        caller.span_id,
        facts.arrived_at_s + offset_s,
        end_s + offset_s,
        _facts(account),
        is_server=True,
        links=lived,
        events=[_event(moment, offset_s) for moment in facts.story.moments],
        error=account.error,
    )
    inner = Context(own.trace_id, "")
    return [
        whole,
        *(
            Span(
                stay.name,
                inner,
                own.span_id,
                stay.begin_s + offset_s,
                stay.end_s + offset_s,
                {"ballast.worker_id": stay.worker_id},
            )
            for stay in stays
        ),
    ]


def stays_of(moments: Sequence[Moment], begin_s: float, end_s: float) -> list[Stay]:
    """Return the contiguous intervals of a request on workers and in between, from its arrival to its end."""
    stays: list[Stay] = []
    name, worker_id, since_s = "backlog", "", begin_s
    for moment in moments:
        if moment.what in _ON_WORKER:
            following = (f"on {moment.worker_id}", moment.worker_id)
        elif moment.what in _OFF_WORKER:
            following = ("between workers" if moment.what is What.MOVING else "backlog", "")
        else:
            continue
        if moment.at_s > since_s:
            stays.append(Stay(name, worker_id, since_s, moment.at_s))
        (name, worker_id), since_s = following, moment.at_s
    return [*stays, Stay(name, worker_id, since_s, end_s)]


def _facts(account: Account) -> dict[str, object]:
    facts = account.facts
    return {
        "ballast.request_id": account.request_id,
        "ballast.ending": account.state,
        "ballast.priority": facts.priority.value,
        "ballast.queue_s": facts.queue_s,
        "ballast.ttft_s": facts.ttft_s,
        "ballast.tpot_s": facts.tpot_s,
        "ballast.moves": facts.move_count,
        "ballast.replays": facts.replay_count,
        "gen_ai.usage.input_tokens": facts.prompt_token_count,
        "gen_ai.usage.output_tokens": facts.completion_token_count,
    }


def _event(moment: Moment, offset_s: float) -> SpanEvent:
    attributes = {
        "ballast.worker_id": moment.worker_id,
        "ballast.detail": moment.detail,
        "ballast.tokens": moment.token_count,
        "ballast.gap_s": moment.gap_s or None,
    }
    return SpanEvent(moment.what.value, moment.at_s + offset_s, attributes)
