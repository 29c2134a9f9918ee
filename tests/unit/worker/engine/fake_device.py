"""Runs stages on a fictitious device, on which mixing devices is an error. Run it as a separate program, because it
adds a device to torch for the rest of the process.

Nothing is computed (`FakeTensorMode`): tensors have shapes, types and devices. The device is not a CUDA device, because
a build of torch without CUDA refuses to slice tensors on one.
"""

import importlib
import itertools
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ballast.common.errors import ConfigError
from ballast.common.sampling import SamplingParams
from services.worker.core.batch import IN_FLIGHT, Batch, NewSequence, Slice, StepResult
from services.worker.engine.attention_cuda import CudaAttention
from services.worker.engine.decode_graphs import DecodeGraphs
from services.worker.engine.model import Model
from services.worker.engine.model_config import read_model_config
from services.worker.engine.operations import FusedOperations, TorchOperations
from services.worker.engine.parameters import ParameterLayout, end_parameters, layer_parameters, part_specs
from services.worker.engine.runner import ModelRunner
from services.worker.engine.sampler_gpu import GpuSampler
from services.worker.memory.backend import ExtentRun, MemoryBackend
from services.worker.memory.device import DeviceMemory
from services.worker.memory.kv_cache import KvShape
from services.worker.memory.tensors import TensorOperations
from tools.model.tiny import make_tiny

_setup_privateuseone_for_python_backend("fakegpu")

DEVICE = torch.device("fakegpu", 0)
LAYERS = 4
ROLES = {"alone": (0, LAYERS), "first": (0, 2), "middle": (1, 3), "last": (2, LAYERS)}
BATCHES = {
    "decodes": ((7, 1), (20, 1), (0, 1)),
    "chunks": ((0, 5), (16, 37)),
    "mixed": ((7, 1), (0, 12), (30, 1), (9, 6)),
}
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.05, seed=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1, logprobs=3),
    SamplingParams(temperature=1.0, min_tokens=8, logit_bias={5: 1.0}, seed=2, logprobs=1),
)


class FakeBackend(TensorOperations):
    """A `MemoryBackend` with addresses, but no memory."""

    device = DEVICE
    granularity_bytes = 2 << 20

    def __init__(self) -> None:
        self._end = 1 << 40

    def create(self, extent_bytes: int, count: int) -> None: ...

    def give_up(self, runs: Sequence[ExtentRun]) -> None: ...

    def take_back(self, runs: Sequence[ExtentRun], files: Iterable[int] | None = None) -> None: ...

    def export(self, first: int, count: int) -> list[int]:
        raise ConfigError("device", "a fake one shares no memory")

    def beside(self, files: Iterable[int]) -> MemoryBackend:
        raise ConfigError("device", "a fake one shares no memory")

    def reserve(self, size_bytes: int) -> int:
        address, self._end = self._end, self._end + size_bytes
        return address

    def release(self, address: int, size_bytes: int) -> None: ...

    def map(self, address: int, runs: Sequence[ExtentRun]) -> None: ...

    def unmap(self, address: int, runs: Sequence[ExtentRun]) -> None: ...

    def tensor(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=DEVICE)

    def synchronise(self) -> None: ...

    def close(self) -> None: ...


class FakeKernel:
    """Replaces the Triton kernel and checks the properties of its arguments on which that kernel relies."""

    launches = 0

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(
            out: torch.Tensor,
            q: torch.Tensor,
            kv: torch.Tensor,
            shape: torch.Tensor,
            tables: torch.Tensor,
            tiles: torch.Tensor,
            parts: torch.Tensor,
            weights: torch.Tensor,
            q_row_stride: int,
            scale: float,
            base_block: int,
            **constants: Any,
        ) -> None:
            del scale
            assert kv.storage_offset() == base_block * kv.stride(0)
            for name, tensor in (
                ("out", out),
                ("q", q),
                ("kv", kv),
                ("shape", shape),
                ("tables", tables),
                ("tiles", tiles),
                ("parts", parts),
            ):
                assert tensor.device == DEVICE, f"{name} is on {tensor.device}"
            assert shape.dtype == tables.dtype == tiles.dtype == torch.int32
            assert grid[0] > 0
            assert out.dtype == q.dtype == kv.dtype
            assert out.is_contiguous()
            assert kv.is_contiguous()
            assert q.stride() == (q_row_stride, constants["HEAD_DIM"], 1)
            self.launches += 1

        return launch


class FakeFusedKernels:
    """Replaces a module of kernels: counts launches and checks that all tensors are on the device."""

    def __init__(self, module: str = "fused_kernels") -> None:
        self._module = f"services.worker.engine.{module}"
        self.launches: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        real = importlib.import_module(self._module)
        expected = set(getattr(real, name).arg_names)

        def launch(*given: Any, **constants: Any) -> None:
            assert set(constants) - {"num_warps"} == {name for name in expected if name.isupper()}
            assert len(given) == sum(name.islower() for name in expected)
            tensors = [each for each in given if isinstance(each, torch.Tensor)]
            assert all(each.device == DEVICE and each.stride(-1) == 1 for each in tensors)
            self.launches[name] += 1

        return defaultdict[tuple[int, ...], Any](lambda: launch)


class Launches(TorchDispatchMode):
    """Counts the operations that torch launches on the device: all except views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name() and isinstance(out, torch.Tensor) and out.numel():
            self.count += out.device == DEVICE
        return out


def launch_now(launch: Callable[[], None]) -> Callable[[], None]:
    """Launches at once instead of recording."""
    launch()
    return launch


def pretend_values() -> None:
    """Values that are read back from the device are zeros, and conditions on them are true."""

    def zeros(tensor: torch.Tensor) -> Any:
        def of(shape: Sequence[int]) -> Any:
            return [of(shape[1:]) for _ in range(shape[0])] if shape else 0

        return of(tensor.shape)

    real_tensor, real_from_numpy = torch.tensor, torch.from_numpy  # these create real tensors, whatever the device

    def tensor(data: Any, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> torch.Tensor:
        real = real_tensor(data, dtype=dtype)
        return torch.empty(real.shape, dtype=real.dtype, device=device)

    def from_numpy(array: np.ndarray) -> torch.Tensor:
        real = real_from_numpy(array)
        return torch.empty(real.shape, dtype=real.dtype)

    torch.tensor, torch.from_numpy = tensor, from_numpy
    values: tuple[tuple[str, Callable[[FakeTensor], Any]], ...] = (
        ("tolist", zeros),
        ("__bool__", lambda _: True),
        ("__int__", lambda _: 0),
        ("__float__", lambda _: 0.0),
    )
    for name, value in values:
        setattr(FakeTensor, name, value)


def steps() -> Iterator[tuple[str, str, Batch, list[tuple[int, ...]]]]:
    for role, batch in itertools.product(ROLES, BATCHES):
        shares = BATCHES[batch]
        slices = tuple(Slice(i, before, (7,) * count, i != 1) for i, (before, count) in enumerate(shares))
        tables = [tuple(range(-(-(before + count) // 16))) for before, count in shares]
        added = tuple(NewSequence(i, (1,) * (before + 1), (), SAMPLINGS[i]) for i, (before, _) in enumerate(shares))
        yield role, batch, Batch(0, (), added, slices), tables


def run(model_dir: Path, dtype: torch.dtype) -> None:
    config = read_model_config(model_dir)
    shape = KvShape(
        layer_count=LAYERS, block_tokens=16, kv_heads=config.kv_head_count, head_dim=config.head_dim, dtype=dtype
    )
    memory = DeviceMemory.open(
        FakeBackend(),
        budget_bytes=256 << 20,
        layers=[part_specs(layer_parameters(config, i, ParameterLayout.ROWS), dtype) for i in range(LAYERS)],
        others={name: part_specs(part, dtype) for name, part in end_parameters(config, ParameterLayout.ROWS).items()},
        kv_shape=shape,
    )
    model = Model(config, memory.parameters, memory.kv, max_model_len=config.max_position)
    attention = CudaAttention(config.head_count, config.kv_head_count, config.head_dim, dtype, DEVICE)
    attention._kernel = kernel = FakeKernel()
    attention._join = FakeFusedKernels("paged_kernel").join_parts
    sampler = GpuSampler(config.vocab_size, config.eos_token_ids, DEVICE)
    sampler._kernels = choosing = FakeFusedKernels("sampling_kernels")
    model._operations = operations = FusedOperations(config, config.max_position, dtype, DEVICE)
    operations._kernels = fused = FakeFusedKernels()
    runner = ModelRunner(config, model, attention, sampler, memory.kv)
    for role, name, batch, tables in steps():
        first, last = ROLES[role]
        rows = sum(len(part.token_ids) for part in batch.slices)
        # A link over host memory delivers hidden states on the CPU.
        hidden = None if first == 0 else torch.empty(rows, config.hidden_size, dtype=dtype)
        before = kernel.launches
        fused.launches.clear()
        choosing.launches.clear()
        try:
            out = runner.run_stage(batch, tables, hidden, first_layer=first, last_layer=last)
        except Exception as error:
            error.add_note(f"{model_dir.name}, {dtype}, stage {role}, {name}")
            raise
        kinds = len({len(part.token_ids) > 1 for part in batch.slices})  # decodes, chunks
        assert kernel.launches - before == kinds * (last - first)
        norms = 2 * (last - first) + (last == LAYERS)
        assert fused.launches == {"add_and_norm": norms, "rotate_and_write": last - first, "activate": last - first}
        if last == LAYERS:
            assert isinstance(out, StepResult)
            assert len(out.token_ids) == sum(part.samples for part in batch.slices)
            assert 1 <= choosing.launches["find_best"] <= 2  # for the candidates to draw from, and for the ranked ones
            assert choosing.launches.total() <= 6  # whatever sampling the rows ask for
        else:
            assert isinstance(out, torch.Tensor)
            assert (out.device, tuple(out.shape)) == (DEVICE, (rows, config.hidden_size))
        runner.forget_all()
    recorded = DecodeGraphs(
        model, attention, launch_now, tokens=64, sequences=4, longest=config.max_position, block_tokens=16
    )
    replaying = ModelRunner(config, model, attention, sampler, memory.kv, recorded)
    for role, _, batch, tables in steps():
        first, last = ROLES[role]
        rows = sum(len(part.token_ids) for part in batch.slices)
        hidden = None if first == 0 else torch.empty(rows, config.hidden_size, dtype=dtype)
        out = replaying.run_stage(batch, tables, hidden, first_layer=first, last_layer=last)
        assert isinstance(out, StepResult) or (out.device, tuple(out.shape)) == (DEVICE, (rows, config.hidden_size))
        replaying.forget_all()
    for launching in (runner, replaying):  # a token that is not sampled yet is read on the device
        new = NewSequence(1, (5, 6), (), SamplingParams(temperature=0.0))
        launching.launch(Batch(1, (), (new,), (Slice(1, 0, (5, 6), True),)), [(0,)])
        ahead = launching.launch(Batch(2, (), (), (Slice(1, 2, (IN_FLIGHT,), True),)), [(0,)])
        assert len(ahead.collect().token_ids) == 1
        launching.forget_all()
    counts: list[int] = []
    for each in (operations, TorchOperations(config, config.max_position, dtype, DEVICE)):
        model._operations = each
        launched: list[int] = []
        for last in (1, 3):
            _, _, batch, tables = next(steps())
            before = kernel.launches + fused.launches.total()
            with Launches() as by_torch:
                runner.run_stage(batch, tables, None, first_layer=0, last_layer=last)
            launched.append(by_torch.count + kernel.launches + fused.launches.total() - before)
            runner.forget_all()
        counts.append((launched[1] - launched[0]) // 2)
    assert counts[0] == 9  # including four matrix products
    assert counts[1] > counts[0] + 6
    memory.drop_layers([2, 3])
    memory.move([(1, 0)])
    memory.shrink_retired(2, [(5, 1)])
    memory.release_retired()
    memory.make_room_for_layers([2, 3], block_count=memory.leaving_block_count)
    memory.check()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = [make_tiny(arch, Path(folder) / arch, seed=7, layers=LAYERS) for arch in ("llama", "qwen2", "qwen3")]
        pretend_values()
        for model_dir, dtype in zip(models, (torch.bfloat16, torch.float32, torch.float16), strict=True):
            with FakeTensorMode(allow_non_fake_inputs=True):
                run(model_dir, dtype)


if __name__ == "__main__":
    main()
