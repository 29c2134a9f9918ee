"""`make demo` and `ballast bench replay` as a user types them, on real clusters."""

import subprocess
import sys
from pathlib import Path

import pytest

from ballast.bench.results import read_result
from ballast.model.tiny import make_tiny

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 200


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_a_short_demo_serves_and_verifies(tmp_path: Path) -> None:
    done = run("benchmarks.demo", "--limit", "30", "--time-scale", "0.5", "--out", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 30 answers differ between the two runs" in done.stdout
    policies = read_result(tmp_path / "demo" / "results.json").policies
    assert list(policies) == ["recompute", "drop"]
    policy = policies["drop"]
    assert (policy.request_count, policy.verified_count, policy.token_mismatches) == (30, 30, 0)
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
    done = run("ballast.cli.main", "bench", "replay", *arguments, "--device-memory-bytes", str(64 << 20))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TTFT" in done.stdout
    result = read_result(out)
    assert result.trace.format == "mooncake"
    assert result.policies["recompute"].output_token_count == 160
