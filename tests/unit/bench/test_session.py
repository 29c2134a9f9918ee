"""A replay over real gRPC against a scripted dispatcher, from the trace file to the result."""

import asyncio
import io
import signal
import sys
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console

from ballast.common.errors import Overloaded
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc
from tests.support.scripted_dispatcher import ScriptedDispatcher, serving, worker_status
from tools.bench.records import RequestOutcome
from tools.bench.replay import ReplayOptions
from tools.bench.results import BenchResult, read_result
from tools.bench.session import ReplayJob, replay_on

ROOT = Path(__file__).parents[3]


def dispatcher_with_model(max_model_len: int = 100) -> ScriptedDispatcher:
    dispatcher = ScriptedDispatcher()
    dispatcher.status.model.CopyFrom(
        cluster_pb2.ModelInfo(
            name="m",
            architecture="LlamaForCausalLM",
            layer_count=4,
            vocab_size=64,
            max_model_len=max_model_len,
            dtype="float32",
            parameter_count=10,
            kv_bytes_per_token=128,
            eos_token_ids=[1],
        )
    )
    worker = worker_status()
    dispatcher.status.workers.append(worker)
    group = dispatcher.status.layout.groups.add(group_id=worker.group_id)
    group.members.add(worker_id=worker.worker_id, incarnation=worker.incarnation, last_layer=4)
    return dispatcher


def write_trace(tmp_path: Path, rows: list[tuple[float, int, int]]) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{a},{i},{o}\n" for a, i, o in rows))
    return path


def test_a_trace_becomes_requests_and_their_answers_figures(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, [(0.0, 10, 6), (0.2, 20, 6), (0.4, 900, 6), (9.0, 1, 1)])
    dispatcher = dispatcher_with_model()
    dispatcher.refuse = [Overloaded("backlog full", 1.0)]
    job = ReplayJob(
        trace=trace,
        time_scale=0.5,
        length_scale=0.5,
        limit=3,
        options=ReplayOptions(seed=4, record_tokens=True, deadline_s=30),
    )

    async def story() -> BenchResult:
        async with serving(dispatcher) as address, asyncio.timeout(60):
            return await replay_on(address, job, Console(file=io.StringIO()), {"workers": 1})

    result = asyncio.run(story())
    policy = result.policies["unknown"]  # no planner reports the policy
    assert result.complete
    assert [r.outcome for r in policy.requests] == [
        RequestOutcome.REFUSED,
        RequestOutcome.FINISHED,
        RequestOutcome.FINISHED,
    ]
    assert policy.requests[0].error == "backlog full"
    assert policy.requests[1].output_token_ids == [0, 1, 2]
    assert (result.trace.request_count, result.trace.clamped_count, result.trace.span_s) == (3, 1, 0.2)
    assert result.config.cluster == {"workers": 1}
    assert policy.series.kv_capacity_bytes[0] == 100 * 16 * 128
    assert policy.series.kv_used_bytes[0] == 25 * 16 * 128

    assert len(dispatcher.requests) == 3, "a refusal is a result, so it is not retried"
    last = dispatcher.requests[-1]
    assert list(last.token_ids.ids) == policy.requests[2].prompt_token_ids
    assert len(last.token_ids.ids) == 97
    assert max(last.token_ids.ids) < 64
    assert last.sampling.ignore_eos
    assert last.sampling.temperature == 0.0
    assert last.sampling.max_tokens == 3
    assert last.omit_text


class ToldPlanner(planner_pb2_grpc.PlannerServiceServicer):
    """Reports one drop that began 100 s ago and one that began just now."""

    async def ListTransitions(
        self, request: planner_pb2.ListTransitionsRequest, context: Any
    ) -> planner_pb2.ListTransitionsResponse:
        recent = planner_pb2.Transition(
            epoch=4,
            kind="drop",
            phase="done",
            reason="overload",
            age_s=0.05,
            prepare_s=0.01,
            commit_s=0.02,
            exchange_s=0.03,
            kv_bytes_exchanged=1000,
        )
        old = planner_pb2.Transition(epoch=2, kind="drop", phase="done", age_s=100.0, exchange_s=1.0)
        return planner_pb2.ListTransitionsResponse(transitions=[recent, old], overload_policy="swap")


def replayed(tmp_path: Path, planner: str | None) -> tuple[BenchResult, str]:
    job = ReplayJob(trace=write_trace(tmp_path, [(0.0, 5, 3), (0.1, 5, 3)]))
    log = io.StringIO()

    async def story() -> BenchResult:
        server = grpc.aio.server()
        planner_pb2_grpc.add_PlannerServiceServicer_to_server(ToldPlanner(), server)  # pyright: ignore[reportAbstractUsage]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with serving(dispatcher_with_model()) as address, asyncio.timeout(60):
                return await replay_on(address, job, Console(file=log), planner=planner or f"127.0.0.1:{port}")
        finally:
            await server.stop(None)

    return asyncio.run(story()), log.getvalue()


def test_the_planner_reports_the_transitions_of_the_run_and_no_earlier_ones(tmp_path: Path) -> None:
    result, log = replayed(tmp_path, None)
    [transition] = result.policies["swap"].transitions  # the planner reports the policy's name
    assert (transition.epoch, transition.kind, transition.moved_bytes) == (4, "drop", 1000)
    assert transition.duration_s is not None
    assert abs(transition.duration_s - 0.06) < 1e-9
    assert 0.0 <= transition.at_s < 5.0
    assert "transitions" not in log


def test_a_planner_that_does_not_answer_loses_no_result(tmp_path: Path) -> None:
    result, log = replayed(tmp_path, "127.0.0.1:1")
    assert result.complete
    assert result.policies["unknown"].transitions == []
    assert "transitions are only what was seen from outside" in log
    assert "127.0.0.1:1" in log


def test_ctrl_c_writes_an_incomplete_result_and_says_so(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, [(0.0, 5, 3), (60.0, 5, 3)])
    out = tmp_path / "r.json"
    dispatcher = dispatcher_with_model()

    async def story() -> tuple[int | None, str]:
        async with serving(dispatcher) as address, asyncio.timeout(60):
            arguments = ["bench", "replay", "--trace", str(trace), "--address", address, "--json", str(out)]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tools.cli.main", *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
            )
            await dispatcher.started.wait()
            await asyncio.sleep(3.0)  # until the client has received three tokens
            process.send_signal(signal.SIGINT)
            output, _ = await process.communicate()
            return process.returncode, output.decode()

    returncode, output = asyncio.run(story())
    assert returncode == 130
    assert "interrupted" in output
    result = read_result(out)
    assert not result.complete
    assert [r.outcome for r in result.policies["unknown"].requests] == [RequestOutcome.FINISHED]


def test_an_unreachable_address_is_reported_at_once(tmp_path: Path) -> None:
    import subprocess

    trace = write_trace(tmp_path, [(0.0, 5, 3)])
    arguments = ["bench", "replay", "--trace", str(trace), "--address", "127.0.0.1:1"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.cli.main", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
