"""`python -m deploy.observability.traced_drop`: traces of requests during a drop, as shown by Jaeger.

It starts a cluster of emulated GPUs and a collector, sends requests, drops parameters while they run, and prints the
trace of a moved request and that of the drop. `--out FILE` writes both in Jaeger's JSON format, which its UI opens
("Upload"); `--otlp FILE` writes the spans as the services sent them, which Tempo imports.
"""

import argparse
import asyncio
import base64
import http.server
import json
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ballast.client import AsyncClient, SamplingParams
from ballast.rpc.channel import open_channel
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc
from sim.jobs.machines import catalogue_machine, stand_in
from tools.local.cluster import LocalCluster, Service

_WITHIN_S = 60.0
_REQUESTS, _TOKENS = 16, 300
_WIDTH = 56
_IDS = ("traceId", "spanId", "parentSpanId")

Json = dict[str, Any]  # Any: JSON of OTLP and Jaeger


@dataclass
class Collector:
    """Receives spans as OTLP over HTTP, like Jaeger and Tempo, and keeps them in OTLP's JSON format."""

    url: str = ""
    bodies: list[Json] = field(default_factory=list[Json])

    def spans(self) -> list[Json]:
        """All spans, each with its `service` and `instance`."""
        found: list[Json] = []
        for body in list(self.bodies):
            for resource in body["resourceSpans"]:
                told = attributes(resource["resource"])
                who = {"service": told["service.name"], "instance": told["service.instance.id"]}
                found += [{**span, **who} for scope in resource["scopeSpans"] for span in scope["spans"]]
        return found


@contextmanager
def collecting() -> Generator[Collector]:
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            collector.bodies.append(json.loads(json_format.MessageToJson(sent), object_hook=_with_hex_ids))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield collector
        server.shutdown()


def _with_hex_ids(of: Json) -> Json:
    """Convert ids from base64, as in protobuf's JSON format, to hexadecimal, as in OTLP's."""
    return {key: base64.b64decode(value).hex() if key in _IDS else value for key, value in of.items()}


def flags_for(collector: Collector) -> dict[Service, list[str]]:
    services: tuple[Service, ...] = ("dispatcher", "worker", "planner", "gateway")
    return {name: ["--otlp-traces-endpoint", collector.url] for name in services}


def attributes(of: Mapping[str, Any]) -> dict[str, Any]:
    return {one["key"]: next(iter(one["value"].values())) for one in of["attributes"]}


def moved_request(spans: Sequence[Json]) -> tuple[list[Json], list[Json]] | None:
    """(spans of a request that a drop moved, spans of the drop); None until all of them have arrived."""
    for root in spans:
        is_moved = any(event["name"] == "moved" for event in root.get("events", ()))
        if root["name"] != "request" or not is_moved or not root.get("links"):
            continue
        trace = [one for one in spans if one["traceId"] == root["traceId"]]
        drop = [one for one in spans if one["traceId"] == root["links"][0]["traceId"]]
        workers = {one["instance"] for one in trace if one["service"] == "ballast-worker"}
        if drop and len(workers) > 1:
            return trace, drop
    return None


def to_jaeger(spans: Sequence[Json]) -> Json:
    """One trace in the format of Jaeger's `/api/traces`."""
    processes = {who: f"p{number}" for number, who in enumerate(sorted({(s["service"], s["instance"]) for s in spans}))}
    return {
        "traceID": spans[0]["traceId"],
        "spans": [_jaeger_span(one, processes[(one["service"], one["instance"])]) for one in spans],
        "processes": {
            name: {"serviceName": service, "tags": [{"key": "instance", "type": "string", "value": instance}]}
            for (service, instance), name in processes.items()
        },
    }


def _jaeger_span(span: Json, process: str) -> Json:
    begin_us, end_us = int(span["startTimeUnixNano"]) // 1000, int(span["endTimeUnixNano"]) // 1000
    parent = [("CHILD_OF", span["traceId"], span["parentSpanId"])] if "parentSpanId" in span else []
    linked = [("FOLLOWS_FROM", link["traceId"], link["spanId"]) for link in span.get("links", ())]
    return {
        "traceID": span["traceId"],
        "spanID": span["spanId"],
        "operationName": span["name"],
        "references": [{"refType": kind, "traceID": t, "spanID": s} for kind, t, s in (*parent, *linked)],
        "startTime": begin_us,
        "duration": end_us - begin_us,
        "tags": _tags(attributes(span)),
        "logs": [
            {
                "timestamp": int(event["timeUnixNano"]) // 1000,
                "fields": _tags({"event": event["name"], **attributes(event)}),
            }
            for event in span.get("events", ())
        ],
        "processID": process,
        "warnings": None,
    }


def _tags(values: Mapping[str, Any]) -> list[Json]:
    return [
        {"key": key, "type": "float64" if isinstance(value, float) else "string", "value": value}
        for key, value in values.items()
    ]


def waterfall(spans: Sequence[Json]) -> str:
    """The spans of a trace as a chart in text: one line per span, sorted by start."""
    ordered = sorted(
        spans, key=lambda s: (int(s["startTimeUnixNano"]), "parentSpanId" in s, -int(s["endTimeUnixNano"]))
    )
    first, last = int(ordered[0]["startTimeUnixNano"]), max(int(one["endTimeUnixNano"]) for one in spans)
    scale = _WIDTH / max(1, last - first)
    lines: list[str] = []
    for one in ordered:
        begin, end = int(one["startTimeUnixNano"]) - first, int(one["endTimeUnixNano"]) - first
        left = min(int(begin * scale), _WIDTH - 1)
        bar = " " * left + "█" * max(1, round((end - begin) * scale))
        where = f"{one['instance']}: {one['name']}"
        lines.append(f"{where:<36} {bar:<{_WIDTH + 1}} {(end - begin) / 1e6:8.1f} ms")
    return "\n".join(lines)


async def drop_under_load(cluster: LocalCluster) -> None:
    """Send requests, drop parameters once every group is running some of them, and wait for the answers."""
    sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    async with AsyncClient(cluster.address) as client, open_channel(cluster.address) as channel:
        asked = [
            asyncio.create_task(client.generate(token_ids=list(range(8, 500)), sampling=sampling))
            for _ in range(_REQUESTS)
        ]
        async with asyncio.timeout(_WITHIN_S):
            while not all(g.load and g.load.running_count >= 2 for g in (await client.status()).groups):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            planner = planner_pb2_grpc.PlannerServiceStub(channel)
            await planner.Drop(planner_pb2.DropRequest(worker_ids=["worker-0", "worker-1"], request_id="d"), timeout=30)
            await asyncio.gather(*asked)


async def traced(folder: Path) -> tuple[Collector, list[Json], list[Json]]:
    """Run the cluster. Returns (the collector, spans of a moved request, spans of the drop)."""
    made = stand_in(folder / "stand-in", catalogue_machine("A100-40G", "Qwen2.5-14B", 4096))
    with collecting() as collector:
        flags = flags_for(collector)
        flags["worker"] += made.worker_flags
        async with LocalCluster(made.model, workers=2, flags=flags) as cluster:
            await drop_under_load(cluster)
            async with asyncio.timeout(_WITHIN_S):
                while (found := moved_request(collector.spans())) is None:  # noqa: ASYNC110 -- filled by a thread
                    await asyncio.sleep(0.1)
    return collector, *found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.observability.traced_drop", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write both traces in Jaeger's JSON format")
    parser.add_argument("--otlp", type=Path, metavar="FILE", help="write all spans as they were sent")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ballast-traced-") as folder:
        collector, request, drop = asyncio.run(traced(Path(folder)))
    print(waterfall(request), "\n\nlinked to\n", waterfall(drop), sep="\n")
    if args.out:
        args.out.write_text(json.dumps({"data": [to_jaeger(request), to_jaeger(drop)]}, indent=1) + "\n")
    if args.otlp:
        resources = [resource for body in collector.bodies for resource in body["resourceSpans"]]
        args.otlp.write_text(json.dumps({"resourceSpans": resources}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
