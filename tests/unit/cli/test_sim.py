"""`ballast sim` from its arguments to its files."""

from pathlib import Path

import pytest

from services.worker.emulation.machine import Roofline
from sim.jobs.machines import catalogue_machine, emulated_model
from tests.support.simulated import burst
from tools.bench.records import RequestOutcome
from tools.bench.results import BenchResult, read_result
from tools.cli import sim
from tools.cli.main import main

MODEL = ("--model", "llama-2-13b", "--cluster", "2xA100-40G")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "burst.csv"
    rows = [f"{a.at_s:.3f},{a.input_tokens},{a.output_tokens}\n" for a in burst()]
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(rows))
    return path


def test_both_policies_are_compared_and_the_result_is_stated_in_words(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main(["sim", "--trace", str(trace), *MODEL, "--json", str(out)]) == 0
    told = capsys.readouterr().out
    result = read_result(out)
    assert (result.kind, list(result.policies)) == ("sim", ["recompute", "drop"])
    drop, recompute = result.policies["drop"], result.policies["recompute"]
    assert [t.kind for t in drop.transitions if t.phase == "done"] == ["drop", "restore"]
    assert drop.slo_reference.policy == recompute.slo_reference.policy == "recompute"
    assert drop.outcomes[RequestOutcome.FINISHED] == drop.request_count == len(burst())
    assert 0.0 < (drop.bubble_fraction or 0.0) < 1.0
    assert "Ballast drops parameters once" in " ".join(told.split())
    assert "times better" in " ".join(told.split())


def test_a_burst_that_fits_in_fewer_bits_needs_no_drop(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same burst needs a drop in bfloat16."""
    out, narrow = tmp_path / "out.json", ("--quantization", "fp8", "--kv-cache-dtype", "fp8")
    assert main(["sim", "--trace", str(trace), *MODEL, "--policy", "drop", *narrow, "--json", str(out)]) == 0
    result = read_result(out)
    assert (result.model.dtype, result.model.kv_bytes_per_token) == ("fp8", 2 * 40 * 5120)
    assert not result.policies["drop"].transitions
    assert main(["sim", "--trace", str(trace), *MODEL, "--quantization", "int3"]) == 2
    assert "--quantization" in capsys.readouterr().err


def test_progress_of_a_long_run_is_written_to_a_pipe(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim, "_LINE_INTERVAL_S", 0.0)
    assert main(["sim", "--trace", str(trace), *MODEL, "--policy", "drop"]) == 0
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "simulating drop ..."
    counts = [int(line.removeprefix("simulating drop: ").partition("/")[0]) for line in lines]
    assert counts == sorted(counts)
    assert len(counts) > 2
    assert lines[-1].endswith(" s")


@pytest.mark.parametrize("kind", ["batch", "default"])
def test_offline_work_runs_alongside_generated_arrivals(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    arrivals = ["--arrivals", "rate_per_s=1,span_s=12,cv=2,on_s=5,off_s=3", "--offline", "longbench"]
    policies = "drop,drop:offline-slowdown=1000:label=step boundaries"
    assert main(["sim", *arrivals, "--offline-class", kind, *MODEL, "--policy", policies]) == 0
    told = capsys.readouterr().out
    assert "5 s on and 3 s off" in " ".join(told.split())
    tokens = [int(line.split()[2].replace(",", "")) for line in told.splitlines() if line.startswith("offline work")]
    assert len(tokens) == 2
    assert min(tokens) > 5000


def test_wrong_generated_arrivals_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--arrivals", "rate_per_s=x", *MODEL]) == 2
    assert "--arrivals" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_figures(trace: Path, tmp_path: Path) -> None:
    def result(name: str, *more: str) -> BenchResult:
        out = tmp_path / name
        flags = ("--limit", "15", "--policy", "drop", "--rate-scale", "1.5")
        assert main(["sim", "--trace", str(trace), *MODEL, *flags, *more, "--json", str(out)]) == 0
        return read_result(out)

    first, again, other = result("1.json"), result("2.json"), result("3.json", "--seed", "3")
    assert first.policies == again.policies
    assert first.config == again.config
    assert first.policies != other.policies


def test_a_figure_is_drawn(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out.png"
    assert main(["sim", "--trace", str(trace), *MODEL, "--limit", "5", "--plot", str(out)]) == 0
    assert out.stat().st_size > 10_000


def test_a_scenario_defines_everything_and_flags_override_it(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario, out = tmp_path / "scenario.yaml", tmp_path / "out.json"
    scenario.write_text(f"description: a burst\ntrace: {trace}\nmodel: Llama-2-13B\ncluster: 2xA100-40G\nlimit: 5\n")
    assert main(["sim", "--scenario", str(scenario), "--limit", "3", "--policy", "drop", "--json", str(out)]) == 0
    result = read_result(out)
    assert (result.trace.request_count, list(result.policies)) == (3, ["drop"])
    scenario.write_text("description: a burst\nmodle: Llama-2-13B\n")
    assert main(["sim", "--scenario", str(scenario)]) == 2
    assert "modle: unknown setting" in capsys.readouterr().err


GPU = """
memory_bytes: 42949672960
flops_per_s: 312.0e+12
memory_bytes_per_s: 1.555e+12
scale_up_bytes_per_s: 300.0e+9
nic_bytes_per_s: 25.0e+9
host_bytes_per_s: 25.0e+9
gpus_per_host: 8
layer_floor_s: 0.000053
"""


def test_a_custom_gpu_is_described_by_a_file(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the catalogue's figures for an A100, results equal those of an A100."""
    own, fast = tmp_path / "own.yaml", tmp_path / "fast.yaml"
    own.write_text(GPU)
    fast.write_text(GPU.replace("312.0", "936.0").replace("1.555", "4.665"))

    def p50_tpot_s(cluster: str) -> float:
        out = tmp_path / "out.json"
        flags = ("--model", "llama-2-13b", "--cluster", cluster, "--limit", "5", "--policy", "drop", "--json", str(out))
        assert main(["sim", "--trace", str(trace), *flags]) == 0
        return read_result(out).policies["drop"].tpot_s.p50 or 0.0

    known, same, less = (p50_tpot_s(f"2x{name}") for name in ("A100-40G", own, fast))
    assert known == same > less > 0.0
    capsys.readouterr()
    find = ("--gpu", str(own), "--model", "llama-2-13b", "--slo-ttft-s", "60", "--limit", "5")
    assert main(["size", str(trace), *find]) == 0
    assert "With dropping, 1 own meets it" in " ".join(capsys.readouterr().out.split())
    assert catalogue_machine(str(own), "llama-2-13b").name == "1 x own"
    wide, narrow = (
        emulated_model(tmp_path / "model", str(own), Path("llama-2-13b"), None, each).machine
        for each in ("auto", "fp8_e4m3")
    )
    assert wide.name == "1 x own"
    assert isinstance(wide.execution, Roofline)
    assert isinstance(narrow.execution, Roofline)
    assert narrow.execution.costs.context_s == wide.execution.costs.context_s / 2  # half as many bytes of KV are read


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "own.yaml: cannot be read: No such file or directory"),
        ("- a\n- b\n", "own.yaml: must be one GPU's figures, as A800-80G has them"),
        ("a: [\n", "own.yaml: is not YAML"),
        (GPU.replace("gpus_per_host: 8\n", ""), "own.yaml: gpus_per_host: Field required"),
        (GPU.replace("nic_bytes", "nick_bytes"), "own.yaml: nick_bytes_per_s: unknown figure"),
        (GPU.replace("312.0e+12", "-1"), "own.yaml: flops_per_s: Input should be greater than 0"),
    ],
)
def test_errors_in_a_gpu_file_are_named(
    content: str | None, told: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.yaml"
    if content is not None:
        own.write_text(content)
    flags = ("--trace", str(trace), "--model", "llama-2-13b", "--cluster", f"2x{own}")
    assert main(["sim", *flags]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "--model: is missing; or give a --scenario"),
        (("--model", "gpt-5", "--cluster", "2xA800"), "model: 'gpt-5' is not known; known are DeepSeek-V3"),
        (("--model", "llama-2-7b", "--cluster", "2xB300"), "'B300' is not known; known are A100-40G"),
        (("--model", "llama-2-7b", "--cluster", "A800"), "cluster: must be like 8xA800"),
        (("--model", "qwen2.5-72b", "--cluster", "2xA800"), "one instance of Qwen2.5-72B takes 4"),
        (("--model", "llama-2-13b", "--cluster", "2x4090"), "no room for a KV cache; use larger GPUs"),
        (
            (*MODEL, "--policy", "evict"),
            "'evict'; known are drop, swap, migrate, recompute, static-pipeline",
        ),
        ((*MODEL, "--policy", ","), "--policy: names none"),
        ((*MODEL, "--rate-scale", "0"), "--rate-scale: Input should be greater than 0"),
        ((*MODEL, "--lengths", "nothing"), "'nothing' is no file, and no data set"),
    ],
)
def test_usage_errors_are_reported(
    trace: Path, flags: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "--trace", str(trace), *flags]) == 2
    assert told in capsys.readouterr().err


def test_an_invalid_trace_is_reported_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("arrival_s,input_tokens,output_tokens\n0.0,10,5\n1.0,many,5\n")
    assert main(["sim", "--trace", str(wrong), *MODEL]) == 2
    assert f"{wrong}:3: input_tokens must be a whole number" in capsys.readouterr().err


def test_truncated_requests_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "long.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,100000,10\n1,100,10\n")
    find = ("--gpu", "A100-40G", "--model", "llama-2-13b", "--slo-ttft-s", "60")
    assert main(["size", str(trace), *find]) == 0
    assert "1 request exceeds the model's maximum length and was shortened" in " ".join(capsys.readouterr().out.split())
