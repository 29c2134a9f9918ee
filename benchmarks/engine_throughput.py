"""Offline throughput of one engine beside that of `transformers`, in one process and one intra-op thread.

    python -m benchmarks.engine_throughput [--kernels native torch] [--lengths exponential gamma fixed]
                                           [--repetitions N] [--write]

Ballast computes with its compiled kernels and with torch's, in turn. All serve the same requests with the same
lengths, greedily and to the last token. Only asked-for output tokens count. How lengths are spread matters: a static
batch is as long as its longest member, and what runs at once drains towards the end. Exponential ones vary about as
much as those of published traces, gamma ones half as much, fixed ones not. Repetitions are interleaved, so that other
load on the machine hits all alike. Both wall and processor time are shown: on a machine that is busy otherwise only
the second says something, on an idle one they are the same.
"""

import argparse
import itertools
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ballast.common.ids import RequestId
from ballast.common.sampling import SamplingParams
from services.worker.core.batch import Batch
from services.worker.core.events import BatchWanted, Emit, Execute, SequenceKey, StepDone, StreamOpened, Submitted
from services.worker.core.limits import WorkerLimits
from services.worker.core.worker import WorkerCore
from services.worker.engine.load import Engine, load_engine
from services.worker.engine.native.library import native_kernels, packed_shape
from tools.bench.environment import describe_environment
from tools.model.tiny import make_preset

REQUESTS, INPUT_MEAN, OUTPUT_MEAN = 64, 128, 64
RIVAL_BATCH = 16
MEMORY_BYTES = 1 << 30
RESULTS = Path(__file__).parent / "results"
# Of mean 1 before they are scaled; the coefficients of variation are 1, 0.5 and 0.
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "exponential": lambda rng: rng.exponential(1.0, REQUESTS),
    "gamma": lambda rng: rng.gamma(4.0, 0.25, REQUESTS),
    "fixed": lambda _: np.ones(REQUESTS),
}


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    output_tokens: int


def make_requests(
    vocab_size: int, spread: str = "exponential", input_mean: int = INPUT_MEAN, output_mean: int = OUTPUT_MEAN
) -> list[Request]:
    """Lengths of the named distribution, scaled to the means."""
    rng = np.random.default_rng(0)

    def lengths(mean: int, low: int, high: int) -> list[int]:
        drawn = DISTRIBUTIONS[spread](rng)
        return [int(n) for n in np.clip(np.rint(drawn * mean / drawn.mean()), low, high)]

    pairs = zip(lengths(input_mean, 4, 1024), lengths(output_mean, 2, 512), strict=True)
    return [Request(tuple(rng.integers(16, vocab_size, n).tolist()), out) for n, out in pairs]


@dataclass(frozen=True)
class Spent:
    wall_s: float
    processor_s: float


class Stopwatch:
    def __init__(self) -> None:
        self._wall_s, self._processor_s = time.perf_counter(), time.process_time()

    def read(self) -> Spent:
        return Spent(time.perf_counter() - self._wall_s, time.process_time() - self._processor_s)


def run_ballast(
    engine: Engine, requests: Sequence[Request], limits: WorkerLimits, heard: dict[int, list[int]] | None = None
) -> Spent:
    """With the scheduler that the worker uses. `heard` is filled: number of the request -> its tokens."""
    core = WorkerCore(limits, engine.block_count)
    core.handle(StreamOpened(0.0, 1))
    for i, request in enumerate(requests):
        sampling = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)
        core.handle(
            Submitted(
                at_s=0.0,
                key=SequenceKey(1, i + 1),
                request_id=RequestId(str(i)),
                attempt=1,
                prompt_token_ids=request.prompt,
                sampling=sampling,
                wants_text=False,
            )
        )
    watch = Stopwatch()
    while core.has_work:
        for command in core.handle(BatchWanted(0.0)):
            if isinstance(command, Execute):
                result = engine.step(command.batch, command.block_tables)
                for news in core.handle(StepDone(0.0, result, ("",) * len(result.token_ids))):
                    if heard is not None and isinstance(news, Emit):
                        _hear(news, heard)
    spent = watch.read()
    engine.step(Batch(0, engine.runner.sequence_ids, (), ()), [])  # the core tells of the last ends in its next batch
    assert core.totals.generation_tokens == sum(request.output_tokens for request in requests)
    return spent


def _hear(news: Emit, heard: dict[int, list[int]]) -> None:
    tokens = iter(news.token_ids)
    for handle, count in zip(news.handles, news.token_counts, strict=True):
        heard.setdefault(handle - 1, []).extend(itertools.islice(tokens, count))


def limits_of(engine: Engine, running: int, batch_tokens: int) -> WorkerLimits:
    return WorkerLimits(
        block_tokens=engine.block_tokens,
        max_model_len=engine.info.max_model_len,
        vocab_size=engine.config.vocab_size,
        max_running_count=running,
        max_batch_tokens=batch_tokens,
    )


def run_static(model: Any, requests: Sequence[Request]) -> Spent:
    """`generate`: batches in order of arrival, each as long as its longest member."""
    watch = Stopwatch()
    for first in range(0, len(requests), RIVAL_BATCH):
        batch = requests[first : first + RIVAL_BATCH]
        width, count = max(len(r.prompt) for r in batch), max(r.output_tokens for r in batch)
        ids = torch.tensor([[0] * (width - len(r.prompt)) + list(r.prompt) for r in batch])
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
        model.generate(
            ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return watch.read()


def run_continuous(model: Any, requests: Sequence[Request]) -> Spent:
    """What `generate_batch` runs, with each request's own output length, which that call has no way to
    state. Time starts when the manager is ready."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = ContinuousBatchingConfig(max_requests_per_batch=RIVAL_BATCH, max_batch_tokens=512, num_blocks=128)
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=OUTPUT_MEAN)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, timeout=5, warmup=False
    ) as manager:
        watch = Stopwatch()
        wanted = {
            manager.add_request(list(r.prompt), max_new_tokens=r.output_tokens, eos_token_id=-1): r for r in requests
        }
        while wanted:
            result = manager.get_result(timeout=60)
            if result is None:
                raise SystemExit("transformers' continuous batching gave nothing for a minute")
            if result.is_finished():
                assert len(result.generated_tokens) == wanted.pop(result.request_id).output_tokens
        return watch.read()


def gemm_flops_per_s() -> float:
    """What the machine's best float32 matrix product reaches at a size that suits it: torch's or the compiled one."""
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


def work_flops(engine: Engine, requests: Sequence[Request]) -> float:
    """Multiplications and additions in the matrix products that cannot be avoided; attention is not counted."""
    config = engine.config
    table = config.vocab_size * config.hidden_size
    in_layers = engine.info.parameter_count - table * (1 if config.tied_embeddings else 2)
    passed = sum(len(r.prompt) + r.output_tokens - 1 for r in requests)
    sampled = sum(r.output_tokens for r in requests)
    return 2.0 * (passed * in_layers + sampled * table)


def measure(
    model_dir: Path, spread: str, repetitions: int, max_running: int, batch_tokens: int, kernels: Sequence[str]
) -> str:
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rival: Any = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="sdpa"
    )
    rival.eval()
    rival.generation_config.eos_token_id = None
    with ExitStack() as stack:
        engines = {
            kind: stack.enter_context(
                load_engine(model_dir, dtype="float32", device_memory_bytes=MEMORY_BYTES, kernels=kind)
            )
            for kind in kernels
        }
        engine = engines[kernels[0]]
        requests = make_requests(engine.config.vocab_size, spread)
        ours = f"ballast, {kernels[0]} kernels, {max_running} at most, {batch_tokens} tokens a step"
        runs: dict[str, Callable[[], Spent]] = {}
        for kind, one in engines.items():
            for running in (max_running, RIVAL_BATCH):
                name = f"ballast, {kind} kernels, {running} at most, {batch_tokens} tokens a step"
                runs[name] = partial(run_ballast, one, requests, limits_of(one, running, batch_tokens))
        runs |= {
            f"transformers continuous batching, {RIVAL_BATCH} at most": lambda: run_continuous(rival, requests),
            f"transformers.generate, static batch {RIVAL_BATCH}": lambda: run_static(rival, requests),
        }
        spent: dict[str, list[Spent]] = {name: [] for name in runs}
        flops_per_s = 0.0
        for _ in range(repetitions):
            flops_per_s = max(flops_per_s, gemm_flops_per_s())
            for name, run in runs.items():
                spent[name].append(run())
        bound_s = work_flops(engine, requests) / flops_per_s
    return _report(spread, requests, spent, ours, bound_s, flops_per_s, engine.info.parameter_count)


def _report(
    spread: str,
    requests: Sequence[Request],
    spent: dict[str, list[Spent]],
    ours: str,
    bound_s: float,
    flops_per_s: float,
    parameter_count: int,
) -> str:
    output_tokens = sum(r.output_tokens for r in requests)
    wall = {name: statistics.median(s.wall_s for s in each) for name, each in spent.items()}
    processor = {name: statistics.median(s.processor_s for s in each) for name, each in spent.items()}
    lines = [
        f"{len(requests)} requests of {spread} lengths,"
        f" {sum(len(r.prompt) for r in requests)} input and {output_tokens} output tokens,"
        f" {parameter_count / 1e6:.1f} M parameters, float32, one intra-op thread,"
        f" medians of {len(spent[ours])} interleaved repetitions",
        "",
        "| | wall s | processor s | output tokens per processor s | of the arithmetic bound"
        " | ballast is faster by (processor) | (wall) |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {wall[name]:.2f} | {processor[name]:.2f} | {output_tokens / processor[name]:.0f} |"
        f" {bound_s / processor[name]:.0%} | {processor[name] / processor[ours]:.2f} x |"
        f" {wall[name] / wall[ours]:.2f} x |"
        for name in spent
    ]
    lines += [
        "",
        f"Arithmetic bound: {bound_s:.2f} s, the matrix products alone at {flops_per_s / 1e9:.0f} GFLOP/s, the best"
        " that the machine reached on 1024 x 1024 in the same run.",
    ]
    return "\n".join(lines)


def environment() -> str:
    """One line: on what, and how busy it was."""
    found = describe_environment()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    commit = (found.git_commit or "unknown")[:7]
    return (
        f"{found.cpu}, {found.core_count} cores, torch {found.packages.get('torch')}, Python {found.python},"
        f" commit {commit}, load average {load}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    compiled = ["native"] if native_kernels() is not None else []
    parser.add_argument("--kernels", nargs="+", choices=("native", "torch"), default=[*compiled, "torch"])
    parser.add_argument("--lengths", nargs="+", choices=tuple(DISTRIBUTIONS), default=["exponential", "gamma"])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-engine.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder:
        model_dir = make_preset("bench", Path(folder) / "model")
        tables: list[str] = []
        for spread in arguments.lengths:
            tables.append(
                measure(
                    model_dir,
                    spread,
                    arguments.repetitions,
                    arguments.max_num_seqs,
                    arguments.max_num_batched_tokens,
                    arguments.kernels,
                )
            )
            print(tables[-1], flush=True)
    table = "\n\n".join(tables)
    if arguments.write:
        path = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-engine.md"
        path.parent.mkdir(exist_ok=True)
        command = f"python -m benchmarks.engine_throughput --lengths {' '.join(arguments.lengths)} --write"
        path.write_text(f"# Engine throughput\n\n{environment()}\n\n{table}\n\nRepeat with `{command}`.\n")
        print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
