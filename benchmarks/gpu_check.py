"""First checks on a GPU: which parts of Ballast work on it, and how long its basic operations take, on one page.

python -m benchmarks.gpu_check [--out out/gpu_check.md] [--only NAME ...]

Runs the tests marked `gpu` or `any_device`. Exit status 1 if a part failed, 2 if there is no GPU.
"""

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import transfers
from services.worker.core.batch import Slice
from services.worker.engine.attention import AttentionBackend
from services.worker.engine.attention_cuda import CudaAttention, GpuAttentionStep
from services.worker.engine.attention_flashinfer import FlashInferAttention
from services.worker.engine.packing import Packer
from services.worker.memory.cuda import BindingsDriver
from services.worker.memory.gpus import gpu_uuids

_EXTENTS, _ROUNDS = 64, 20
_COPY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class CheckPart:
    """A group of tests for one capability."""

    name: str
    proves: str
    tests: tuple[str, ...]
    package: str | None = None  # package without which the part is skipped
    gpus: int = 1

    @property
    def applies(self) -> bool:
        return torch.cuda.device_count() >= self.gpus and (self.package is None or find_spec(self.package) is not None)


PARTS = (
    CheckPart(
        "memory",
        "extents are mapped, taken away, mapped elsewhere under tensors and captured graphs that stay valid, and opened"
        " by a file as another process would",
        ("tests/unit/worker/memory/test_cuda.py",),
    ),
    CheckPart(
        "kernel",
        "attention in float32, bfloat16 and float16, over KV in float8 too, gives what the CPU gives, the fused kernels"
        " what torch gives, and products in float8 nearly what dequantised matrices give",
        (
            "tests/unit/worker/engine/test_attention_cuda.py::test_kernel_equals_cpu",
            "tests/unit/worker/engine/test_fused_kernels.py::test_on_the_device_fused_kernels_equal_torch",
            "tests/unit/worker/engine/test_quantised.py"
            "::test_on_a_gpu_products_in_float8_are_near_those_of_dequantised_matrices",
        ),
    ),
    CheckPart(
        "flashinfer",
        "attention by FlashInfer gives what the CPU gives, in bfloat16 and float16",
        ("tests/unit/worker/engine/test_attention_flashinfer.py::test_on_a_gpu_flashinfer_equals_the_cpu",),
        package="flashinfer",
    ),
    CheckPart(
        "golden",
        "greedy tokens of five architectures are those of transformers",
        ("tests/unit/worker/engine/test_attention_cuda.py::test_greedy_tokens_on_the_device_equal_transformers",),
    ),
    CheckPart(
        "graphs",
        "decodes that are recorded give the same tokens, also after layers were dropped and restored",
        ("tests/unit/worker/engine/test_decode_graphs.py",),
    ),
    CheckPart(
        "group",
        "drops, exchanges, aborts, restores, migrations and swaps of workers that share the GPU change no token, in"
        " random histories and where one thing goes wrong at a time",
        (
            "tests/integration/test_group_exactness.py::test_no_token_changes_on_a_gpu",
            "tests/integration/test_dissolving.py",
            "tests/integration/test_group_failures.py",
            "tests/integration/test_group_words.py",
            "tests/integration/test_migration.py",
        ),
    ),
    CheckPart(
        "ranks",
        "instances of two ranks that share the GPU, with sums over the host, say what one of one rank says, also while"
        " the first rank maps the other's memory and both drop and restore layers",
        (
            "tests/integration/test_tensor_parallel.py::test_two_ranks_on_a_gpu_generate_the_tokens_of_one",
            "tests/integration/test_tensor_parallel.py::test_no_token_changes_through_drops_and_restores",
        ),
    ),
    CheckPart(
        "sums",
        "two GPUs are one instance, with sums over NCCL: recorded or not they give the same tokens, also after layers"
        " were dropped and restored",
        ("tests/integration/test_tensor_parallel.py::test_two_gpus_generate_the_same_tokens_with_recorded_sums",),
        gpus=2,
    ),
)


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    part: CheckPart
    passed: bool
    took_s: float
    said: str  # the last line of pytest's output


def command(part: CheckPart, *extra: str) -> list[str]:
    chosen = "gpu or (any_device and not host_extents)"
    return [sys.executable, "-m", "pytest", "-q", "-n0", "--device", "cuda", "-m", chosen, *extra, *part.tests]


def prove(part: CheckPart) -> CheckVerdict:
    print(f"{part.name}: {part.proves} ...", flush=True)
    began_s = time.monotonic()
    done = subprocess.run(command(part), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    said = (done.stdout.strip().splitlines() or ["nothing"])[-1]
    if done.returncode:
        print(done.stdout)
    passed = done.returncode == 0 and "passed" in said and "skipped" not in said
    print(f"  {'proven' if passed else 'FAILED'} after {time.monotonic() - began_s:.0f} s", flush=True)
    return CheckVerdict(part, passed, time.monotonic() - began_s, said)


# ------------------------------------------------------------ costs


def median_us(act: Callable[[], object]) -> float:
    times_s: list[float] = []
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        act()
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s) * 1e6


def memory_calls(driver: BindingsDriver) -> Iterator[tuple[str, float]]:
    """Return microseconds per extent for mapping, allowing access and unmapping 64 extents of the smallest size in a
    row, and microseconds per synchronisation with an idle device.
    """
    size_bytes = driver.granularity_bytes
    whole_bytes = _EXTENTS * size_bytes
    handles = [driver.create(size_bytes) for _ in range(_EXTENTS)]
    address = driver.reserve_address(whole_bytes)
    times: dict[str, list[float]] = {"map": [], "access": [], "unmap": []}

    def timed(name: str, act: Callable[[], object]) -> None:
        began_s = time.perf_counter()
        act()
        times[name].append((time.perf_counter() - began_s) * 1e6 / _EXTENTS)

    def map_all() -> None:
        for at, handle in enumerate(handles):
            driver.map(address + at * size_bytes, size_bytes, handle)

    for _ in range(_ROUNDS):
        timed("map", map_all)
        timed("access", lambda: driver.allow_access(address, whole_bytes))
        timed("unmap", lambda: driver.unmap(address, whole_bytes))
    driver.free_address(address, whole_bytes)
    for handle in handles:
        driver.release(handle)
    for name, values in times.items():
        yield f"{name}, for each of {_EXTENTS} extents of {size_bytes >> 20} MiB", statistics.median(values)
    yield "waiting for a device that does nothing", median_us(driver.synchronise)


def copies(device: torch.device) -> Iterator[tuple[str, float]]:
    """Copy bandwidths in GB/s."""
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    other = torch.empty_like(there)
    for kind in ("pinned", "pageable"):
        here = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=kind == "pinned")
        for name, target, source in (("to the device", there, here), ("from the device", here, there)):

            def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
                target.copy_(source)
                torch.cuda.synchronize(device)

            yield f"{name}, {kind} memory", _COPY_BYTES / median_us(copy) / 1e3

    def inside() -> None:
        other.copy_(there)
        torch.cuda.synchronize(device)

    yield "inside the device", _COPY_BYTES / median_us(inside) / 1e3


def decodes(device: torch.device) -> Iterator[tuple[str, float]]:
    """GB/s of keys and values read by attention, in a layer with 32 heads and 8 KV heads of 128; also with FlashInfer
    if installed.
    """
    heads, kv_heads, head_dim, block_tokens = 32, 8, 128, 16
    heads_of = (heads, kv_heads, head_dim, torch.bfloat16, device)
    backends: dict[str, AttentionBackend] = {"attention": CudaAttention(*heads_of)}
    if find_spec("flashinfer") is not None:
        backends["FlashInfer's attention"] = FlashInferAttention(*heads_of)
    for sequences, context in ((1, 1024), (1, 16384), (1, 131072), (8, 16384), (64, 2048)):
        width = context // block_tokens
        tables = [tuple(range(i * width, (i + 1) * width)) for i in range(sequences)]
        slices = [Slice(i, context - 1, (1,), True) for i in range(sequences)]
        packed = Packer(block_tokens).pack(slices, tables)
        kv = torch.zeros(sequences * width, 2, block_tokens, kv_heads, head_dim, dtype=torch.bfloat16, device=device)
        q = torch.zeros(sequences, heads, head_dim, dtype=torch.bfloat16, device=device)
        for name, backend in backends.items():
            step = backend.prepare(packed)
            assert isinstance(step, GpuAttentionStep)
            attend = partial(_attend, step, kv, q)
            attend()  # may compile
            yield f"{name} of {sequences} decodes over {context:,} tokens each", kv.nbytes / median_us(attend) / 1e3


def _attend(step: GpuAttentionStep, kv: torch.Tensor, q: torch.Tensor) -> None:
    step.attend(kv, q, torch.empty_like(q))
    torch.cuda.synchronize(q.device)


# ------------------------------------------------------------ the page


# ------------------------------------------------------------ activations alongside KV


def priorities(devices: str, transport: str, *options: str) -> Iterator[tuple[str, float]]:
    """Age of activations on arrival in milliseconds, with and without KV on the same link."""
    asked = ["--devices", devices, "--transport", transport, "--rounds", "3", *options]
    peer = transfers.TransferPeer()
    try:
        figures = transfers.measure_speed("unlimited", transfers.parser_of_options().parse_args(asked), peer)
    finally:
        peer.close()
    for way in ("idle", "naive", "coordinated"):
        of = figures.ways[way]
        yield f"{transport}, {way}: median", of.p50_s * 1e3
        yield f"{transport}, {way}: 99 %", of.p99_s * 1e3


def page(
    header: Sequence[str],
    verdicts: Sequence[CheckVerdict],
    costs: Sequence[tuple[str, float]],
    rates: Sequence[tuple[str, float]],
    waits: Sequence[tuple[str, float]],
) -> str:
    lines = ["# What works on this GPU", "", *header, "", "| part | | seconds | what it proves |", "|---|---|---|---|"]
    for one in verdicts:
        word = "proven" if one.passed else "**FAILED**"
        lines.append(f"| {one.part.name} | {word} | {one.took_s:.0f} | {one.part.proves} ({one.said.strip('= ')}) |")
    lines += ["", "| memory call | us |", "|---|---|", *(f"| {name} | {us:.1f} |" for name, us in costs)]
    lines += [
        "",
        "| what is copied or read | GB/s |",
        "|---|---|",
        *(f"| {name} | {rate:.1f} |" for name, rate in rates),
        "",
        "| an activation comes, without KV on its way, behind it, and as links do it | ms |",
        "|---|---|",
        *(f"| {name} | {wait_ms:.2f} |" for name, wait_ms in waits),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gpu_check.md"))
    parser.add_argument("--only", nargs="*", choices=[part.name for part in PARTS])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no GPU: nothing of the GPU path is proven here (`ballast doctor` says what is missing)")
        return 2
    uuids = gpu_uuids()
    header = [
        f"- {len(uuids)} x {torch.cuda.get_device_name(0)}, the first is {uuids[0]}; CUDA {torch.version.cuda}",
        f"- torch {torch.__version__}, triton {version('triton')}, cuda-bindings {version('cuda-bindings')},"
        f" Python {platform.python_version()}",
    ]
    print("cost of memory calls, copies, attention and links ...", flush=True)
    costs = list(memory_calls(BindingsDriver.open(0)))
    rates: list[tuple[str, float]] = []
    for measure in (copies, decodes):
        rates += measure(torch.device("cuda", 0))
    waits = list(priorities("cuda:0,cuda:0", "tcp"))
    if len(uuids) > 1:
        waits += priorities("cuda:0,cuda:1", "nccl")
    wanted = [part for part in PARTS if arguments.only is None or part.name in arguments.only]
    verdicts = [prove(part) for part in wanted if part.applies]
    text = page(header, verdicts, costs, rates, waits)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text)
    print(text)
    return int(not all(one.passed for one in verdicts))


if __name__ == "__main__":
    sys.exit(main())
