"""`make demo` and `ballast bench replay` as a user types them, on real clusters."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.results import read_result
from tools.model.tiny import make_tiny

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.rotating
@pytest.mark.timeout(TIMEOUT_S + 10)
def test_a_short_demo_serves_and_verifies(tmp_path: Path) -> None:
    scales = ["--limit", "12", "--probe-s", "1", "--time-scale", "0.3"]
    done = run("benchmarks.demo", *scales, "--out", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 12 answers differ between the two runs" in done.stdout
    policies = read_result(tmp_path / "demo" / "results.json").policies
    assert list(policies) == ["recompute", "drop"]
    policy = policies["drop"]
    assert (policy.request_count, policy.verified_count, policy.token_mismatches) == (12, 12, 0)
    assert policy.series.kv_capacity_bytes[-1] > 0
    assert (tmp_path / "demo" / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_replay_starts_a_cluster_of_its_own(tmp_path: Path) -> None:
    model = make_tiny("qwen3", tmp_path / "model")
    trace = tmp_path / "mooncake.jsonl"
    rows = [f'{{"timestamp": {i * 100}, "input_length": {20 + i}, "output_length": 8}}\n' for i in range(20)]
    trace.write_text("".join(rows))
    out = tmp_path / "r.json"
    arguments = ["--trace", str(trace), "--model", str(model), "--workers", "1", "--json", str(out)]
    done = run("tools.cli.main", "bench", "replay", *arguments, "--device-memory-bytes", str(64 << 20))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TTFT" in done.stdout
    result = read_result(out)
    assert result.trace.format == "mooncake"
    [policy] = result.policies.values()
    assert policy.output_token_count == 160


@pytest.mark.rotating
@pytest.mark.timeout(2 * TIMEOUT_S + 10)
def test_a_comparison_is_planned_run_continued_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = make_tiny("llama", tmp_path / "model", max_len=256)
    trace = tmp_path / "steps.csv"
    rows = [f"{0.05 * i:.2f},{20 + i % 7},{10 + i % 5}\n" for i in range(60)]
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(rows))
    out = tmp_path / "out"
    command = ["tools.cli.main", "bench", "overload", "--out", str(out), "--model", str(model)]
    command += ["--workloads", str(trace), "--repetitions", "1", "--probe-s", "0.5", "--span-s", "3"]
    done = run(*command, "--policies", "static-pipeline")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(*command, "--policies", "static-pipeline,swap:swap-blocks-per-step=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 2 runs are finished already" in done.stdout
    results = [read_result(path) for path in sorted((out / "runs").rglob("*.json"))]
    pipeline, swap = sorted(results, key=lambda result: list(result.policies))
    assert pipeline.policies["static-pipeline"].series.group_sizes[0] == [2]
    assert swap.comparison is not None
    assert swap.comparison.knobs == {"swap-blocks-per-step": "2"}
    assert swap.trace.request_count == pipeline.trace.request_count
    assert [r.input_tokens for p in swap.policies.values() for r in p.requests] == [
        r.input_tokens for p in pipeline.policies.values() for r in p.requests
    ]
    done = run("tools.cli.main", "bench", "plot", "--results", str(out), "--out", str(tmp_path / "plot"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "plot" / "comparison.json").exists()


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_a_comparison_on_emulated_workers_keeps_arrivals_and_lengths(tmp_path: Path) -> None:
    trace, out = tmp_path / "steps.csv", tmp_path / "out"
    rows = [f"{0.1 * i:.2f},{200 + i},{10 + i % 5}\n" for i in range(20)]
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(rows))
    machine = ["--engine", "emulated", "--profile", "A100-40G", "--model", "Qwen2.5-14B", "--workers", "2"]
    what = ["--policies", "recompute", "--workloads", str(trace), "--repetitions", "1", "--out", str(out)]
    done = run("tools.cli.main", "bench", "overload", *machine, *what)
    if "void" in done.stdout:
        assert done.returncode == 1
        pytest.skip("this machine was busy with something else, so the run was void")
    assert done.returncode == 0, done.stdout + done.stderr
    result = read_result(out / "runs" / "steps" / "recompute.0.json")
    [policy] = result.policies.values()
    assert policy.outcomes["finished"] == 20  # pyright: ignore[reportArgumentType] -- a StrEnum
    assert [(r.input_tokens, r.output_tokens) for r in policy.requests] == [(200 + i, 10 + i % 5) for i in range(20)]
    assert policy.tpot_s.p50 is not None
    assert policy.tpot_s.p50 > 0.02, "an A100 reads 28 GB of parameters per token"
    assert result.config.cluster["gpu"] == "1 x A100-40G"
