"""The dashboards and alerts of deploy/observability against a real cluster under load, evaluated by a real Prometheus
if installed.
"""

import asyncio
import contextlib
import itertools
import json
import math
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ballast.client import AsyncClient, ClusterStatus, RequestStory, SamplingParams
from ballast.common.errors import InvalidRequest, NotFound
from ballast.rpc.channel import open_channel
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc
from deploy.observability.boards import BOARDS, FOLDER, queries, text
from deploy.observability.traced_drop import attributes, collecting, flags_for, moved_request, to_jaeger
from tests.support.cluster import RunningCluster, running_cluster, until
from tests.support.waiting import soon
from tools.bench.traces import read_trace
from tools.cli.main import main
from tools.local.cluster import LocalCluster
from tools.local.ports import free_port
from tools.model.tiny import make_preset, make_tiny

ALERTS = FOLDER / "alerts.yml"
TRACED = 1500  # tokens, enough that requests outlast the preparation of a drop
_WORDS = re.compile(r'"[^"]*"|\b(?:by|without)\s*\(([^)]*)\)|\[[^\]]*\]')
_SELECTOR = re.compile(r"\b((?:ballast|process|vllm:)_?[a-z0-9_]+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')


def alert_values() -> dict[str, str]:
    """Alert -> the expression that is compared with its threshold."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    found = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    return {name: re.split(r"\s(?:>|<|==)\s", expr)[0] for name, expr in found.items()}


def board_queries() -> list[str]:
    return [query for _, panels in BOARDS.values() for query in queries(panels)]


def page_queries() -> list[str]:
    """The queries of docs/metrics.md."""
    page = FOLDER.parents[1] / "docs" / "metrics.md"
    return re.findall(r"\| `([^`]*\(.*\)|ballast_[^`]* / [^`]*)`", page.read_text())


def filled_in(query: str) -> str:
    return query.replace("$__rate_interval", "20s").replace("$model", ".*")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A cluster that has performed a drop and a restore, and has answered requests throughout."""
    model = make_preset("tiny", tmp_path_factory.mktemp("model") / "tiny")
    with running_cluster(
        model,
        workers=2,
        gateways=1,
        metrics_port=0,
        device_memory_bytes=4 << 20,
    ) as running:
        running.run(send_load(running.cluster))
        yield running


async def send_load(cluster: LocalCluster) -> None:
    """Sends requests before, during and after a drop and a restore."""
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    over = asyncio.Event()
    async with (
        AsyncClient(cluster.address) as client,
        open_channel(cluster.address) as channel,
        asyncio.TaskGroup() as tasks,
    ):

        async def again_and_again() -> None:
            while not over.is_set():
                await client.generate("A ship", sampling)

        for _ in range(24):
            tasks.create_task(again_and_again())
        await until(client, lambda status: status.running_request_count > 0)
        planner = planner_pb2_grpc.PlannerServiceStub(channel)
        drop = planner_pb2.DropRequest(worker_ids=["worker-0", "worker-1"], request_id="drop")
        await planner.Drop(drop, timeout=60)
        await _ended(planner, 1)
        await planner.Restore(planner_pb2.RestoreRequest(request_id="restore"), timeout=60)
        await _ended(planner, 2)
        over.set()
    [base] = cluster.http_urls
    body = json.dumps({"model": "tiny", "prompt": "A ship", "max_tokens": 4, "stream": True}).encode()
    request = urllib.request.Request(f"{base}/completions", body, {"Content-Type": "application/json"})
    await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=60).read())


async def _ended(planner: "planner_pb2_grpc.PlannerServiceAsyncStub", count: int) -> None:
    async with asyncio.timeout(60):
        while True:
            answer = await planner.ListTransitions(planner_pb2.ListTransitionsRequest(), timeout=30)
            if sum(one.phase == "done" for one in answer.transitions) >= count:
                return
            await asyncio.sleep(0.05)


def samples_of(cluster: LocalCluster) -> list[Sample]:
    """Metric samples of all services, with the two labels that Prometheus adds."""
    found: list[Sample] = []
    targets = {**cluster.metrics_targets, **{p.id: p.address for p in cluster.processes["gateway"]}}
    for name, address in targets.items():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            content = answer.read().decode()
        for family in text_string_to_metric_families(content):
            found += [
                s._replace(labels={**s.labels, "job": name.rpartition("-")[0], "instance": address})
                for s in family.samples
            ]
    return found


def test_the_boards_are_up_to_date() -> None:
    for name in BOARDS:
        assert (FOLDER / "grafana" / f"{name}.json").read_text() == text(name), (
            "run python -m deploy.observability.boards"
        )


def test_every_metric_and_label_of_boards_and_alerts_exists_under_load(loaded: RunningCluster) -> None:
    samples = samples_of(loaded.cluster)
    for query in [*board_queries(), *page_queries(), *alert_values().values()]:
        query = filled_in(query)
        grouped = [word for found in re.findall(r"\bby\s*\(([^)]*)\)", query) for word in found.split(", ")]
        selectors = _SELECTOR.findall(query)
        for name, matchers in selectors:
            fitting = [s for s in samples if s.name == name and matches(s, matchers)]
            assert fitting, f"{name}{{{matchers}}} of {query}"
            assert all(label in fitting[0].labels for label in grouped), (grouped, fitting[0].labels, query)
        assert selectors or query.startswith("up"), query


def matches(sample: Sample, matchers: str) -> bool:
    for label, how, value in _MATCHER.findall(matchers):
        if not re.fullmatch(value if how == "=~" else re.escape(value), sample.labels.get(label, "")):
            return False
    return True


def test_every_sample_of_ours_has_help_and_the_model(loaded: RunningCluster) -> None:
    for name, address in loaded.cluster.metrics_targets.items():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        assert not [s.name for family in families for s in family.samples if s.name.endswith("_created")]
        for family in families:
            assert len(family.documentation.split()) >= 2, f"{name}: {family.name} has no help text"
            if family.name.startswith("ballast_") and name.startswith(("dispatcher", "worker")):
                assert all(s.labels["model_name"] == "tiny" for s in family.samples), family.name
        names = {family.name for family in families}
        assert {"process_resident_memory_bytes", "ballast_build_info"} <= names
        if name.startswith("worker"):
            assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:generation_tokens"} <= names
        if name.startswith("dispatcher"):
            assert {"vllm:num_requests_waiting", "vllm:time_to_first_token_seconds"} <= names
            assert {"vllm:inter_token_latency_seconds", "vllm:request_success"} <= names


def test_a_gateway_shows_the_cluster_as_one_server(loaded: RunningCluster) -> None:
    [address] = [process.address for process in loaded.cluster.processes["gateway"]]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    labels = {"model_name": "tiny", "engine": "cluster"}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"):
        [sample] = families[f"vllm:{name}"].samples
        assert (sample.labels, sample.value >= 0) == (labels, True)
    [info] = families["vllm:cache_config_info"].samples
    workers = [f"{base}/metrics" for name, base in loaded.cluster.metrics_targets.items() if name.startswith("worker")]
    counts = []
    for url in workers:
        with urllib.request.urlopen(f"http://{url}", timeout=30) as answer:
            of_worker = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
        counts.append(int(of_worker["vllm:cache_config_info"].samples[0].labels["num_gpu_blocks"]))
    assert int(info.labels["num_gpu_blocks"]) == sum(counts) > 0


class Prometheus:
    """A real Prometheus that scrapes the services of a cluster."""

    def __init__(self, folder: Path, cluster: LocalCluster) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        targets = cluster.write_metrics_targets(folder / "targets.json")
        (folder / "prometheus.yml").write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(ALERTS)],
                    "scrape_configs": [{"job_name": "ballast", "file_sd_configs": [{"files": [str(targets)]}]}],
                }
            )
        )
        command = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address={self.url.removeprefix('http://')}"]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(["prometheus", *command], stdout=log, stderr=log)

    def ask(self, path: str, **query: str) -> object:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def values(self, query: str) -> list[float]:
        """The current value of every series that the query returns."""
        answer = self.ask("query", query=query)
        assert isinstance(answer, dict)
        return [float(series["value"][1]) for series in answer["result"]]


@pytest.fixture(scope="module")
def prometheus(loaded: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed (Debian: apt-get install prometheus)")
    asking = Prometheus(tmp_path_factory.mktemp("prometheus"), loaded.cluster)
    count = len(loaded.cluster.metrics_targets) + 1
    try:
        give_up_at_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                if asking.values("count(count_over_time(up[20s]) > 4) or vector(0)") == [count]:
                    break
            assert time.monotonic() < give_up_at_s
            time.sleep(0.2)
        # For rates, counters must grow between two scrapes.
        loaded.run(more_load(loaded.cluster))
        time.sleep(3)
        yield asking
    finally:
        asking.process.terminate()
        asking.process.wait(20)


async def more_load(cluster: LocalCluster) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    async with AsyncClient(cluster.address) as client:
        await asyncio.gather(*(client.generate("A ship", sampling) for _ in range(16)))


@pytest.mark.parametrize("query", [*board_queries(), *page_queries()])
def test_a_query_of_a_board_or_of_the_page_returns_a_value(prometheus: Prometheus, query: str) -> None:
    values = prometheus.values(filled_in(query))
    assert values, "the query returned no series"
    assert any(not math.isnan(value) for value in values), values


@pytest.mark.parametrize("name", alert_values())
def test_every_alert_expression_has_a_value(prometheus: Prometheus, name: str) -> None:
    assert prometheus.values(alert_values()[name].replace("[5m]", "[20s]").replace("[15m]", "[20s]"))


def test_no_alert_is_raised_on_a_healthy_cluster(prometheus: Prometheus) -> None:
    answer = prometheus.ask("rules")
    assert isinstance(answer, dict)
    rules = [rule for group in answer["groups"] for rule in group["rules"]]
    assert len(rules) == len(alert_values())
    assert [rule["name"] for rule in rules if rule["health"] == "err"] == []
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


def test_prometheus_accepts_the_files(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    config = (FOLDER / "prometheus.yml").read_text().replace("/etc/prometheus/alerts.yml", str(ALERTS))
    (tmp_path / "prometheus.yml").write_text(config)
    checked = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


def test_a_requests_events_are_logged_and_found_by_id_without_its_text(loaded: RunningCluster) -> None:
    async def story() -> RequestStory:
        async with AsyncClient(loaded.cluster.address) as client:
            sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            answer = await client.generate("Zanzibar", sampling, request_id="told")
            words = [word for word in answer.text.split() if len(word) > 6]
            with pytest.raises(InvalidRequest):
                await client.generate("Zanzibar", SamplingParams(max_tokens=1 << 20), request_id="wrong")
            with pytest.raises(NotFound, match="nobody: no such request"):
                await client.describe_request("nobody")
            assert (await client.describe_request("wrong")).state == "invalid"
            path = loaded.cluster.log_dir / "dispatcher-0.log"
            await soon(lambda: "request_id=told" in path.read_text())  # written after the client has its answer
            log = path.read_text()
            assert not [word for word in (*words, "Zanzibar") if word in log]
            [line] = [line for line in log.splitlines() if "request_id=told" in line]
            assert {"ending=length", "output_tokens=12", "moves=0", "replays=0"} <= set(line.split()), line
            return await client.describe_request("told")

    told = loaded.run(story())
    assert (told.state, told.completion_token_count, told.max_token_count) == ("length", 12, 12)
    assert [moment.what for moment in told.moments][-2:] == ["placed", "first_token"]
    assert told.ttft_s is not None
    assert 0 < told.ttft_s <= told.e2e_s


def test_a_recorded_trace_contains_nothing_but_arrivals_and_lengths(loaded: RunningCluster, tmp_path: Path) -> None:
    async def traffic(began: asyncio.Event) -> None:
        async with AsyncClient(loaded.cluster.address) as client:
            await client.generate("before", SamplingParams(max_tokens=3, ignore_eos=True))
            began.set()
            await asyncio.sleep(1.0)
            for count in (5, 9):
                await client.generate("Zanzibar", SamplingParams(max_tokens=count, ignore_eos=True))

    async def both() -> int:
        began = asyncio.Event()
        sending = asyncio.create_task(traffic(began))
        await began.wait()
        flags = ["record", "--for", "4s", "--out", str(out), "--address", loaded.cluster.address]
        status = await asyncio.to_thread(main, flags)
        await sending
        return status

    out = tmp_path / "trace.csv"
    assert loaded.run(both()) == 0
    recorded = read_trace(out)
    assert [request.output_tokens for request in recorded.requests] == [5, 9]
    assert 0.9 < recorded.requests[0].arrival_s < 4.0
    assert "Zanzibar" not in out.read_text()
    assert out.read_text().splitlines()[1].endswith(",default")


def complete(spans: list[dict[str, Any]]) -> bool:
    return sum(span["name"] == "request" for span in spans) == 8 and moved_request(spans) is not None


@pytest.mark.rotating
def test_a_trace_of_a_request_shows_where_it_was_through_a_drop(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "tiny", max_len=4096)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def story(cluster: LocalCluster) -> None:
        [base] = cluster.http_urls
        body = {"model": "tiny", "prompt": "A ship", "max_tokens": TRACED, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(f"{base}/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        request.add_header("traceparent", parent)
        asked = [asyncio.create_task(asyncio.to_thread(_read, request)) for _ in range(8)]
        async with AsyncClient(cluster.address) as client, open_channel(cluster.address) as channel:
            await until(client, lambda status: all(g.load and g.load.running_count >= 2 for g in status.groups))
            planner = planner_pb2_grpc.PlannerServiceStub(channel)
            drop = planner_pb2.DropRequest(worker_ids=["worker-0", "worker-1"], request_id="drop")
            await planner.Drop(drop, timeout=60)
            await asyncio.gather(*asked)
            async with asyncio.timeout(60):
                while not complete(collector.spans()):  # noqa: ASYNC110 -- filled by a thread
                    await asyncio.sleep(0.05)

    with collecting() as collector:
        flags = flags_for(collector)
        with running_cluster(model, workers=2, gateways=1, device_memory_bytes=32 << 20, flags=flags) as running:
            running.run(story(running.cluster))
    every = collector.spans()
    roots = [one for one in every if one["name"] == "request" and one["traceId"] == parent.split("-")[1]]
    assert len(roots) == 8  # later requests begin their own traces
    calls = {one["spanId"]: one for one in every if one["service"] == "ballast-gateway"}
    assert {root["parentSpanId"] for root in roots} == calls.keys()
    for call in calls.values():
        assert call["parentSpanId"] == parent.split("-")[2]
        assert attributes(call)["http.route"] == "/v1/completions"
        assert attributes(call)["http.response.status_code"] == "200"
    # Selects a request of worker-1: requests of worker-0, which leads the pair, do not move before the restore, if at
    # all.
    inner, stays, moved = next(
        (inner, stays, root)
        for root in roots
        for inner, stays in [parts_of(root, every)]
        if stays[0]["name"] == "on worker-1" and any(event["name"] == "moved" for event in root["events"])
    )
    assert {"on worker-0", "on worker-1"} <= {stay["name"] for stay in stays}
    assert stays[0]["startTimeUnixNano"] == moved["startTimeUnixNano"]
    assert stays[-1]["endTimeUnixNano"] == moved["endTimeUnixNano"]
    for before, after in itertools.pairwise(stays):
        assert before["endTimeUnixNano"] == after["startTimeUnixNano"]
    resumed = next(event for event in moved["events"] if event["name"] == "resumed")
    assert "worker-0+worker-1" in attributes(resumed)["ballast.detail"]
    assert attributes(moved)["gen_ai.usage.output_tokens"] == str(TRACED)
    workers_told_their_part(inner, moved)
    the_planner_told_of_the_drop(every, moved)


def parts_of(root: dict[str, Any], every: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The child spans of a request's span, and the child spans of its stays on workers, sorted by start."""
    inner = [span for span in every if span.get("parentSpanId") == root["spanId"]]
    stays = [span for span in inner if span["service"] == "ballast-dispatcher"]
    return inner, sorted(stays, key=lambda span: int(span["startTimeUnixNano"]))


def workers_told_their_part(inner: list[dict[str, Any]], moved: dict[str, Any]) -> None:
    """Checks the workers' spans: prefill and decode on one worker, then resume and decode on the other. They cover all
    tokens.
    """
    worked = sorted(
        (span for span in inner if span["service"] == "ballast-worker"), key=lambda s: int(s["startTimeUnixNano"])
    )
    returned = ["resume", "decode"] * (len(worked) // 2 - 2)  # if the request lasted until the restore
    assert [span["name"] for span in worked] == ["prefill", "decode", "resume", "decode", *returned]
    assert len({span["instance"] for span in worked}) == 2
    assert attributes(worked[1])["ballast.moved_to"] == worked[2]["instance"]
    assert sum(int(attributes(span)["ballast.tokens"]) for span in worked if span["name"] == "decode") == TRACED
    slack_ns = 50_000_000  # the same machine's clock, read at slightly different times
    for span in worked:
        assert int(span["startTimeUnixNano"]) >= int(moved["startTimeUnixNano"]) - slack_ns
        assert int(span["endTimeUnixNano"]) <= int(moved["endTimeUnixNano"]) + slack_ns


def the_planner_told_of_the_drop(every: list[dict[str, Any]], moved: dict[str, Any]) -> None:
    """Checks that the drop has its own trace, to which the request's span is linked."""
    link = moved["links"][0]
    drop = {span["name"]: span for span in every if span["traceId"] == link["traceId"]}
    assert drop["drop"]["spanId"] == link["spanId"]
    assert drop["drop"]["service"] == "ballast-planner"
    assert attributes(drop["drop"])["ballast.ending"] == "done"
    assert set(drop) == {
        *("drop", "preparing", "committing", "exchanging", "exchange of worker-0", "exchange of worker-1")
    }
    assert all(span["parentSpanId"] == link["spanId"] for name, span in drop.items() if name != "drop")
    shown = to_jaeger([span for span in every if span["traceId"] == moved["traceId"]])
    told = {one["spanID"]: one for one in shown["spans"]}
    references = told[moved["spanId"]]["references"]
    assert {"refType": "FOLLOWS_FROM", "traceID": link["traceId"], "spanID": link["spanId"]} in references
    assert len(shown["processes"]) == 4
    assert all(one["processID"] in shown["processes"] for one in shown["spans"])


def _read(request: urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()


def test_the_status_shows_recent_latencies(loaded: RunningCluster) -> None:
    async def story() -> ClusterStatus:
        await more_load(loaded.cluster)
        async with AsyncClient(loaded.cluster.address) as client:
            return await client.status()

    recent = loaded.run(story()).recent
    assert recent.first_token_count >= 16
    assert 0 < recent.ttft_p50_s <= recent.ttft_p99_s
    assert 0 < recent.tpot_p50_s <= recent.tpot_p99_s
    assert recent.generated_tokens_total >= 16 * 40
    assert recent.longest_wait_s == 0
