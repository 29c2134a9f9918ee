"""Writes the recent activity of a cluster's stages as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

Every worker is a process with a track of the batches that its stage executed; activations sent and received are async
slices, because several may overlap. Phases of transitions are instants. Times are in microseconds.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from ballast.client import Client
from ballast.client.access import Access
from ballast.common.errors import Unavailable
from ballastpb.worker.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 5.0
_MAX_AT_ONCE = 32


Event = dict[str, Any]  # Any: JSON of the trace event format


def write_timeline(address: str, path: Path) -> tuple[int, list[str]]:
    """Ask every worker known to the dispatcher at `address`, and write the trace. Returns (number of slices, workers
    that did not answer).

    Raises:
        Unavailable: neither the dispatcher nor any of its workers answers.
    """
    with Client(address) as client:
        workers = [(worker.worker_id, worker.address) for worker in client.status().workers]
    with ThreadPoolExecutor(_MAX_AT_ONCE) as threads:
        told = list(threads.map(_ask, [worker_address for _, worker_address in workers]))
    traces = [trace for trace in told if trace is not None]
    if not traces:
        raise Unavailable(address, "none of its workers reports its recent steps")
    events = timeline(traces)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    silent = [worker_id for (worker_id, _), trace in zip(workers, told, strict=True) if trace is None]
    return sum(len(trace.spans) for trace in traces), silent


def _ask(address: str) -> worker_pb2.GetTraceResponse | None:
    with Access.of().open_sync(address, "worker") as channel:
        try:
            return worker_pb2_grpc.WorkerServiceStub(channel).GetTrace(worker_pb2.GetTraceRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return None


def timeline(traces: Sequence[worker_pb2.GetTraceResponse]) -> list[Event]:
    """The events of the trace. Times are relative to the earliest event of all workers."""
    begin_s = min((span.began_unix_s for trace in traces for span in trace.spans), default=0.0)
    events: list[Event] = []
    for pid, trace in enumerate(sorted(traces, key=lambda t: t.worker_id), 1):
        times = trace.busy_s + trace.idle_s
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": trace.worker_id}})
        bubble = f"stage, {trace.idle_s / times:.1%} bubbles since its start" if times else "stage"
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": 1, "args": {"name": bubble}})
        for span in trace.spans:
            events += _events(span, pid, begin_s)
    return events


def _events(span: worker_pb2.TraceSpan, pid: int, begin_s: float) -> list[Event]:
    at_us = (span.began_unix_s - begin_s) * 1e6
    if span.kind == "transition":
        name = f"epoch {span.epoch} {span.what}"
        return [{"ph": "i", "name": name, "cat": span.kind, "pid": pid, "tid": 1, "ts": at_us, "s": "p"}]
    args = {"epoch": span.epoch, "microbatch": span.step_id, "tokens": span.token_count}
    common: Event = {"cat": span.kind, "pid": pid, "tid": 1, "args": args}
    if span.kind == "run":
        name = f"{span.step_id}: {span.token_count} tokens"
        return [{**common, "ph": "X", "name": name, "ts": at_us, "dur": span.duration_s * 1e6}]
    key = f"{pid}/{span.kind}/{span.epoch}/{span.step_id}"
    return [
        {**common, "ph": "b", "name": span.kind, "id": key, "ts": at_us},
        {**common, "ph": "e", "name": span.kind, "id": key, "ts": at_us + span.duration_s * 1e6},
    ]
