"""A worker's spans in the traces of requests, recorded by the servicer at submission and output.

Each stay of a request on this worker has two spans: until its first token here (prefill, or resume with KV), and from
there to its end (decode). Traces that are not recorded have no overhead.
"""

from dataclasses import dataclass

from ballast.common.ids import WorkerId
from ballast.service.otlp import Context, Exporter, Span, wall_offset_s
from services.worker.core.events import Emit, Ending, Submitted


@dataclass(slots=True)
class _WorkerStay:
    context: Context  # trace context of the request's span
    submitted: Submitted
    first_token_at_s: float | None = None
    last_token_at_s: float = 0.0
    longest_gap_s: float = 0.0
    token_count: int = 0


class RequestSpans:
    """Records the spans of requests on this worker. Used on the event loop only; times are the servicer's
    `time.monotonic()`.

    Args:
        exporter: Receives spans; None: disabled.
        worker_id: Id of this worker.
    """

    def __init__(self, exporter: Exporter | None, worker_id: WorkerId) -> None:
        self._exporter = exporter
        self._worker_id = worker_id
        self._open: dict[int, dict[int, _WorkerStay]] = {}  # stream -> handle -> stay; at most one per request here

    def submitted(self, event: Submitted, traceparent: str) -> None:
        """Record a submitted request. `traceparent`: of the request's span in its dispatcher."""
        if self._exporter is None or not traceparent:
            return
        context = Context.read(traceparent)
        if context is not None and context.sampled:
            self._open.setdefault(event.key.stream_id, {})[event.key.handle] = _WorkerStay(context, event)

    def told(self, emit: Emit, at_s: float) -> None:
        """Record tokens and endings that are sent to their dispatcher."""
        stays = self._open.get(emit.stream_id)
        if not stays:
            return
        for handle, count in zip(emit.handles, emit.token_counts, strict=True):
            if (stay := stays.get(handle)) is not None:
                if stay.first_token_at_s is None:
                    stay.first_token_at_s = at_s
                else:
                    stay.longest_gap_s = max(stay.longest_gap_s, at_s - stay.last_token_at_s)
                stay.last_token_at_s = at_s
                stay.token_count += count
        for ending in emit.endings:
            if (stay := stays.pop(ending.handle, None)) is not None:
                self._end(stay, at_s, ending)

    def closed(self, stream_id: int, at_s: float) -> None:
        """End the spans of all requests of a stream that has closed."""
        for stay in self._open.pop(stream_id, {}).values():
            self._end(stay, at_s, None)

    def _end(self, stay: _WorkerStay, at_s: float, ending: Ending | None) -> None:
        if self._exporter is not None:
            self._exporter.put(self._spans_of(stay, at_s, ending, wall_offset_s()))

    def _spans_of(self, stay: _WorkerStay, at_s: float, ending: Ending | None, offset_s: float) -> list[Span]:
        event, first_s = stay.submitted, stay.first_token_at_s
        said = {
            "ballast.worker_id": self._worker_id,
            "ballast.request_id": event.request_id,
            "ballast.attempt": event.attempt,
        }
        how: dict[str, object] = {"ballast.ending": "stream closed"}
        error = ""
        if ending is not None:
            how = {"ballast.ending": str(ending.finish_reason), "ballast.moved_to": ending.moved_to}
            error = ending.error
        inner = Context(stay.context.trace_id, "")
        begin_name = "resume" if event.expects_handover else "prefill"
        begin_s, until_s = event.at_s + offset_s, (at_s if first_s is None else first_s) + offset_s
        tokens = {
            "ballast.prompt_tokens": len(event.prompt_token_ids),
            "ballast.tokens_before": len(event.output_token_ids),
        }
        parent = stay.context.span_id
        if first_s is None:
            return [Span(begin_name, inner, parent, begin_s, until_s, {**said, **tokens, **how}, error=error)]
        decoded = {"ballast.tokens": stay.token_count, "ballast.longest_gap_s": stay.longest_gap_s}
        return [
            Span(begin_name, inner, parent, begin_s, until_s, {**said, **tokens}),
            Span("decode", inner, parent, until_s, at_s + offset_s, {**said, **decoded, **how}, error=error),
        ]
