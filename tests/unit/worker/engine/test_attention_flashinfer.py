"""Attention by FlashInfer without a GPU: a fake computes attention from the arguments of FlashInfer's wrappers."""

import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ballast.common.errors import ConfigError
from services.worker.core.batch import Slice
from services.worker.engine import implementation, load
from services.worker.engine.attention import AttentionBackend, CpuAttention
from services.worker.engine.attention_flashinfer import FlashInferAttention, installed, require_version
from services.worker.engine.load import load_engine
from services.worker.engine.model_config import ModelConfig, read_model_config
from services.worker.engine.operations import FusedOperations
from services.worker.engine.packing import PackedStep, Packer
from services.worker.engine.rehearsal import Largest
from tests.support.engine import GREEDY, BlockPool, Job, generate
from tests.unit.worker.engine.fake_flashinfer import DECODE, PREFILL, SIGNATURES, VERSION, FakeFlashInfer, printed
from tools.model.tiny import make_tiny

BLOCKS, CPU = 200, torch.device("cpu")
Heads = tuple[int, int, int]  # query heads, KV heads, head dim
LOGPROBS = replace(GREEDY, logprobs=1)
MIXED = [(7, 1), (0, 12), (15, 1), (9, 6), (90, 1), (130, 33), (16, 16)]


def cases(test: Callable[..., None]) -> Callable[..., None]:
    steps = [[(0, 1), (15, 1), (16, 1), (60, 1)], [(0, 9), (0, 100), (37, 64), (15, 2)], MIXED]
    test = pytest.mark.parametrize("shares", steps, ids=["decodes", "chunks", "mixed"])(test)
    test = pytest.mark.parametrize("heads", [(8, 2, 64), (6, 6, 64), (7, 1, 128), (10, 2, 64)], ids=str)(test)
    test = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)(test)
    return pytest.mark.parametrize("block_tokens", [4, 16])(test)


def packed_of(shares: list[tuple[int, int]], block_tokens: int) -> tuple[PackedStep, torch.Tensor]:
    """Return a packed step, and which slots its sequences own: [B, T]."""
    pool = BlockPool(BLOCKS, block_tokens)
    slices = [Slice(i, before, (1,) * count, True) for i, (before, count) in enumerate(shares)]
    # Block tables are longer than the contexts need, as a scheduler's may be.
    tables = [pool.take(before + count + 2 * block_tokens) for before, count in shares]
    owned_BT = torch.zeros(BLOCKS, block_tokens, dtype=torch.bool)
    for table, (before, count) in zip(tables, shares, strict=True):
        for at in range(before + count):
            owned_BT[table[at // block_tokens], at % block_tokens] = True
    return Packer(block_tokens).pack(slices, tables), owned_BT


class Case:
    """Inputs of one attention step; KV slots that no sequence owns hold NaN."""

    def __init__(self, shares: list[tuple[int, int]], heads: Heads, dtype: torch.dtype, block_tokens: int) -> None:
        torch.manual_seed(0)
        self.heads, self.dtype = heads, dtype
        query_heads, kv_heads, head_dim = heads
        self.packed, owned_BT = packed_of(shares, block_tokens)
        self.kv_B2TKH = torch.randn(BLOCKS, 2, block_tokens, kv_heads, head_dim).to(dtype)
        self.kv_B2TKH.transpose(1, 2)[~owned_BT] = float("nan")
        self.qkv = torch.randn(self.packed.row_count, query_heads + 2 * kv_heads, head_dim).to(dtype)

    def check(self, backend: AttentionBackend, device: torch.device) -> None:
        (out, cache), (wanted, filled) = (
            self._run(backend, device),
            self._run(CpuAttention(*self.heads, self.dtype), CPU),
        )
        atol = 2e-3 if self.dtype == torch.float16 else 2e-2
        torch.testing.assert_close(out, wanted, atol=atol, rtol=0)
        torch.testing.assert_close(cache, filled, atol=0, rtol=0, equal_nan=True)

    def _run(self, backend: AttentionBackend, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        query_heads, kv_heads, head_dim = self.heads
        cache = self.kv_B2TKH.clone().to(device)
        out = torch.empty(self.packed.row_count, query_heads, head_dim, dtype=self.dtype, device=device)
        q, k, v = self.qkv.to(device).split([query_heads, kv_heads, kv_heads], 1)
        backend.prepare(self.packed).run(cache, q, k, v, out)
        return out.cpu(), cache.cpu()


@cases
def test_the_arguments_for_flashinfer_give_the_cpus_results(
    shares: list[tuple[int, int]], heads: Heads, dtype: torch.dtype, block_tokens: int
) -> None:
    double = FlashInferAttention(*heads, dtype, CPU, FakeFlashInfer())
    Case(shares, heads, dtype, block_tokens).check(double, CPU)


@pytest.mark.gpu
@cases
def test_on_a_gpu_flashinfer_equals_the_cpu(
    shares: list[tuple[int, int]], heads: Heads, dtype: torch.dtype, block_tokens: int
) -> None:
    pytest.importorskip("flashinfer")
    device = torch.device("cuda")
    Case(shares, heads, dtype, block_tokens).check(FlashInferAttention(*heads, dtype, device), device)


class Watched:
    """A `PlanCopy` that records its calls."""

    def __init__(self, calls: list[str]) -> None:
        self.wait = lambda: calls.append("wait")
        self.begun = lambda: calls.append("begun")


def test_a_step_is_planned_once_for_all_layers_and_the_next_one_waits_for_the_copy_of_the_plan() -> None:
    library = FakeFlashInfer()
    attention: Any = FlashInferAttention(2, 1, 64, torch.float16, CPU, library)
    attention._copy = Watched(library.calls)
    for shares in ([(3, 1), (0, 5)], [(3, 1)]):
        packed, _ = packed_of(shares, 16)
        step = attention.prepare(packed)
        for _ in range(2):
            kv = torch.zeros(BLOCKS, 2, 16, 1, 64, dtype=torch.float16)
            q = torch.zeros(packed.row_count, 2, 64, dtype=torch.float16)
            step.attend(kv, q, torch.empty_like(q))
    both = [f"run {DECODE}", f"run {PREFILL}"]
    assert library.calls == [
        *("wait", f"plan {DECODE}", f"plan {PREFILL}", "begun", *both, *both),
        *("wait", f"plan {DECODE}", "begun", f"run {DECODE}", f"run {DECODE}"),
    ]


def test_on_a_gpu_fused_kernels_write_the_cache_and_flashinfer_attends(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    config = read_model_config(make_tiny("llama", tmp_path / "model", head_dim=64))
    packed, owned_BT = packed_of(MIXED, 16)
    heads, kv_heads = config.head_count, config.kv_head_count
    step = FlashInferAttention(heads, kv_heads, 64, torch.float16, CPU, FakeFlashInfer()).prepare(packed)
    kv = torch.randn(BLOCKS, 2, 16, kv_heads, 64).to(torch.float16)
    qkv = torch.randn(packed.row_count, heads + 2 * kv_heads, 64).to(torch.float16)
    out, expected = (torch.empty(packed.row_count, heads, 64, dtype=torch.float16) for _ in range(2))
    written: list[torch.Tensor] = []
    operations: Any = FusedOperations(config, 512, torch.float16, CPU)

    def rotate_and_write(*given: Any, **constants: Any) -> None:
        written.append(given[4])

    launch = defaultdict[Any, Any](lambda: rotate_and_write)
    operations._kernels = SimpleNamespace(rotate_and_write=launch)
    operations.attend(kv, qkv, None, torch.from_numpy(packed.positions_T), step, out)
    step.attend(kv, qkv[:, :heads], expected)
    assert torch.equal(out, expected)
    [rows_T] = written
    assert torch.equal(owned_BT.flatten()[packed.slots_T], torch.ones(packed.row_count, dtype=torch.bool))
    assert torch.equal(rows_T, torch.from_numpy(packed.slots_T // 16 * 32 + packed.slots_T % 16))


def test_an_engine_generates_the_same_tokens_with_flashinfer_and_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = make_tiny("qwen3", tmp_path / "model", seed=7, layers=2, head_dim=64)
    runs: list[list[Job]] = []

    def attention(
        device: torch.device, config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, name: str
    ) -> FlashInferAttention:
        return FlashInferAttention(
            config.head_count, config.kv_head_count, config.head_dim, dtype, device, FakeFlashInfer()
        )

    def record(launch: object) -> None:
        raise AssertionError("a plan of FlashInfer holds for one step only")

    for is_flashinfer in (False, True):
        if is_flashinfer:
            monkeypatch.setattr(implementation, "own_attention", attention)
            monkeypatch.setattr(load, "recorder", lambda device: record)  # pyright: ignore[reportUnknownLambdaType]
        largest = Largest(tokens=24, sequences=3)
        with load_engine(
            model_dir, dtype="float16", device_memory_bytes=16 << 20, kernels="torch", largest=largest
        ) as engine:
            prompts = [tuple(range(3, 3 + length)) for length in (1, 15, 16, 17, 70)]
            forced = [tuple(job.chosen) for job in runs[0]] if runs else [None] * len(prompts)
            asked = zip(prompts, forced, strict=True)
            runs.append([Job(i, prompt, 12, LOGPROBS, forced=old) for i, (prompt, old) in enumerate(asked)])
            generate(engine, runs[-1], at_once=3, chunk_tokens=20)
    # Tokens of nearly equal probability may be swapped, so log-probabilities are compared, as in the GPU's tests.
    greatest = [[each.logprob for job in jobs for each in job.logprobs if each is not None] for jobs in runs]
    assert len(greatest[0]) == 60
    torch.testing.assert_close(*map(torch.tensor, greatest), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "said"),
    [
        (
            torch.float32,
            64,
            "attention_backend: flashinfer computes in bfloat16 and float16, not in float32; use triton",
        ),
        (torch.float16, 80, "attention_backend: flashinfer takes heads of 64, 128 or 256 .* have 80; use triton"),
    ],
)
def test_unsupported_models_are_refused(dtype: torch.dtype, head_dim: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FlashInferAttention(4, 2, head_dim, dtype, CPU, FakeFlashInfer())


def test_without_the_package_the_install_command_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", nothing)
    with pytest.raises(ConfigError, match=r"flashinfer-python: pip install 'ballast-serve\[flashinfer\]'"):
        installed()


def test_an_older_version_is_refused() -> None:
    for version in ("0.7.2", "0.7.2.post1", "0.7.10", "0.8.0rc1"):
        require_version(version)
    for version in ("0.2.5", "0.7.1.post3"):
        with pytest.raises(ConfigError, match=rf"flashinfer {version} is too old, at least 0\.7\.2 is required"):
            require_version(version)


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_on_a_cpu_no_backend_can_be_chosen(model_dir: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend: {name} computes on GPUs, with device cpu use auto"):
        load_engine(model_dir, device_memory_bytes=8 << 20, attention_backend=name)


def test_an_unknown_backend_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="attention_backend: 'xformers' is not supported; use one of auto, triton"):
        load_engine(model_dir, device_memory_bytes=8 << 20, attention_backend="xformers")


def test_flashinfer_has_the_parameters_that_are_recorded() -> None:
    library = pytest.importorskip("flashinfer")
    assert isinstance(installed(), type(inspect))
    for (wrapper, method), recorded in SIGNATURES.items():
        real = printed(getattr(getattr(library, wrapper), method))
        if library.__version__ == VERSION:
            assert real == recorded
        # A later version may add parameters.
        names = set(inspect.signature(getattr(getattr(library, wrapper), method)).parameters)
        assert names >= NEEDED[wrapper, method]


_PLAN = {"num_qo_heads", "num_kv_heads", "page_size", "sm_scale", "q_data_type", "kv_data_type"}
NEEDED = {
    (DECODE, "__init__"): {"float_workspace_buffer", "kv_layout", "use_tensor_cores", "backend"},
    (DECODE, "_plan_impl"): _PLAN | {"indptr", "indices", "last_page_len", "head_dim"},
    (DECODE, "run"): {"q", "paged_kv_cache", "out"},
    (PREFILL, "__init__"): {"float_workspace_buffer", "kv_layout", "backend"},
    (PREFILL, "plan"): _PLAN | {"qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "causal"},
    (PREFILL, "run"): {"q", "paged_kv_cache", "out"},
}
