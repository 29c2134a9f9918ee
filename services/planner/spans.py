"""Traces of transitions: a span for each drop and restore, with child spans for stages and for members.

Dispatchers link the spans of requests that ran during a transition to its span
(`ballast.service.otlp.transition_context`).
"""

import itertools
from collections.abc import Callable

from ballast.service.otlp import Context, Exporter, Span, transition_context, wall_offset_s
from services.planner.core.record import TransitionRecord
from services.planner.core.stages import Stage


def spans_of(record: TransitionRecord, offset_s: float) -> list[Span]:
    """Return the spans of a transition. `offset_s`: wall-clock time minus the planner's clock."""
    journal = record.journal
    own = transition_context(journal.target)
    reached = sorted((at_s, stage) for stage, at_s in record.reached_at_s.items())
    end_s = record.ended_at_s or (reached[-1][0] if reached else record.began_at_s)
    facts = {
        "ballast.epoch": journal.epoch,
        "ballast.asked_by": record.by,
        "ballast.why": journal.why,
        "ballast.ending": str(journal.stage),
        "ballast.summary": record.summary,
        "ballast.moved_requests": record.victim_count,
        "ballast.kv_bytes_exchanged": record.total("kv_bytes_sent"),
        "ballast.freed_parameter_bytes": record.total("freed_parameter_bytes"),
    }

    failed = "" if journal.stage is Stage.DONE else journal.failure
    inner = Context(own.trace_id, "")
    whole = Span(str(journal.kind), own, "", record.began_at_s + offset_s, end_s + offset_s, facts, error=failed)
    stages = [
        Span(str(stage), inner, own.span_id, at_s + offset_s, until_s + offset_s, {})
        for (at_s, stage), (until_s, _) in itertools.pairwise(reached)
    ]
    exchanging_s = record.reached_at_s.get(Stage.EXCHANGING)
    members = [
        Span(
            f"exchange of {worker_id}",
            inner,
            own.span_id,
            exchanging_s + offset_s,
            exchanging_s + offset_s + status.exchange_s,
            {
                "ballast.worker_id": worker_id,
                "ballast.kv_bytes_sent": status.kv_bytes_sent,
                "ballast.remap_s": status.remap_s,
                "ballast.max_stall_s": status.max_stall_s,
                "ballast.moved_requests": status.victim_count,
            },
        )
        for worker_id, status in record.statuses.items()
        if exchanging_s is not None
    ]
    return [whole, *stages, *members]


def tracing(exporter: Exporter) -> Callable[[TransitionRecord], None]:
    """Return a function that exports the spans of a transition that has ended."""

    def ended(record: TransitionRecord) -> None:
        exporter.put(spans_of(record, wall_offset_s()))

    return ended
