"""Builds an engine from a checkpoint folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from ballast.common.errors import ConfigError
from ballast.common.load import MemoryReport
from ballast.common.model import ModelInfo
from ballast.service.grammar import Grammars
from services.worker.core.batch import Batch, StepResult
from services.worker.engine.attention import AttentionBackend, CpuAttention
from services.worker.engine.attention_cuda import CudaAttention
from services.worker.engine.attention_flashinfer import FlashInferAttention
from services.worker.engine.checkpoint import Checkpoint, load_parameters, revision_of
from services.worker.engine.decode_graphs import DecodeGraphs, recorder
from services.worker.engine.kernels import bound_kernel_caches
from services.worker.engine.model import Model
from services.worker.engine.model_config import ModelConfig, read_model_config
from services.worker.engine.native.library import Kernels, choose_kernels
from services.worker.engine.packed_attention import PagedAttention
from services.worker.engine.packed_model import PackedModel
from services.worker.engine.parameters import (
    Layout,
    end_parameters,
    layer_parameters,
    layout_for,
    parameter_count,
    part_specs,
)
from services.worker.engine.peers import Peers
from services.worker.engine.rehearsal import CudaMeter, Largest, Meter, blocks_needed, fitting_budget, rehearse
from services.worker.engine.runner import ModelRunner
from services.worker.engine.sampler import AnySampler, Sampler
from services.worker.engine.sampler_gpu import GpuSampler
from services.worker.memory.backend import MemoryBackend
from services.worker.memory.cuda import open_cuda
from services.worker.memory.device import DeviceMemory
from services.worker.memory.gpus import gpu_index
from services.worker.memory.host import HostBackend
from services.worker.memory.host_copy import HostCopy
from services.worker.memory.kv_cache import KvShape
from services.worker.memory.parameters import PartSpec, lay_out
from services.worker.memory.streams import own_stream

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ATTENTION_BACKENDS = ("auto", "triton", "flashinfer")
DEFAULT_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model, its memory and the runner that steps it. Close it when done."""

    info: ModelInfo
    model_dir: Path
    config: ModelConfig
    memory: DeviceMemory
    model: Model | PackedModel
    kernels: Kernels | None  # None: torch's
    threads: int  # that compute one step
    attention: AttentionBackend
    sampler: AnySampler
    runner: ModelRunner
    grammars: Grammars | None  # None: there is no tokenizer
    compute_here: Callable[[], None]  # to be called by a thread that steps it from now on; who has loaded it has
    host_copy: HostCopy = field(default_factory=lambda: HostCopy(_to_host, _from_host))

    @property
    def block_tokens(self) -> int:
        return self.memory.kv.shape.block_tokens

    @property
    def block_count(self) -> int:
        return self.memory.kv.block_count

    def step(self, batch: Batch, block_tables: Sequence[Sequence[int]]) -> StepResult:
        """See `ModelRunner.step`."""
        return self.runner.step(batch, block_tables)

    def read_layer(self, layer: int) -> None:
        """Fill a layer's parameters again: from host memory if they were kept there, else from the checkpoint. Any
        thread; the layer is not executed meanwhile.
        """
        if self.host_copy.fill(self.memory.parameters, layer):
            return
        layout = layout_for(self.memory.pool.backend.device, self.kernels)
        with Checkpoint(self.model_dir, self.kernels) as checkpoint:
            for rank, store in enumerate(self.memory.parameters.of_ranks):
                config = self.config if rank == self.config.rank else replace(self.config, rank=rank)
                checkpoint.fill(layer_parameters(config, layer, layout), store.layer(layer))

    def keep_layer(self, layer: int) -> None:
        """Copy a layer's parameters to host memory. Any thread."""
        self.host_copy.keep(self.memory.parameters, layer)

    def memory_report(self) -> MemoryReport:
        return self.memory.report()

    def check(self) -> None:
        """Raise InvariantViolation unless the device's memory is accounted for (I3)."""
        self.memory.check()

    def close(self) -> None:
        """Return all device memory. The runner must not be stepped afterwards. Idempotent."""
        self.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_engine(
    model_dir: Path,
    *,
    device_memory_bytes: int | None,
    dtype: str = "auto",
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    max_model_len: int | None = None,
    device: str = "cpu",
    name: str | None = None,
    threads: int | None = 1,
    kernels: str = "auto",
    backend: MemoryBackend | None = None,
    gpu_memory_utilization: float = 0.9,
    largest: Largest | None = None,
    links_bytes: int = 0,
    peers: Peers | None = None,
    enforce_eager: bool = False,
    attention_backend: str = "auto",
) -> Engine:
    """Load a checkpoint into one device's memory.

    `dtype` "auto" is the checkpoint's own. `max_model_len` None is the longest that the model allows. `threads` is
    with how many one step is computed, in this whole process (None: as it is). `kernels`: "native" are the compiled
    ones, "torch" those of torch, and "auto" the compiled ones wherever they can be used. `backend`: memory of that
    device which is to be had in another way than usual.

    On a GPU the `largest` steps are run before the parameters are loaded: what they need is not dealt out. Without
    `device_memory_bytes` parameters and KV get what they, and links with `links_bytes`, leave of
    `gpu_memory_utilization`.

    On a GPU steps of decodes are recorded, for as many rows as the `largest` has, unless `enforce_eager` says not to.
    `attention_backend`: "triton" are our own kernels, which "auto" takes, since FlashInfer's were never run on a GPU by
    us; "flashinfer" are those, and with them nothing is recorded.

    With `peers` this is one rank of a tensor-parallel instance and loads its share; the facts told of the model are
    those of all ranks together.

    Raises:
        ConfigError: the checkpoint cannot be served as asked, or the device has not the memory.
    """
    bound_kernel_caches()
    index = gpu_index(device)
    compute_here = own_stream(torch.device("cpu") if index is None else torch.device("cuda", index))
    compute_here()  # what the largest steps take is kept for the stream that they run on
    whole = config = read_model_config(model_dir)
    if peers is not None:
        config = whole.of_rank(peers.rank, peers.count)
    run_dtype = _dtype(dtype, config, model_dir)
    native = choose_kernels(kernels, device, config, run_dtype)
    step_threads = _set_threads(threads, native)
    layout = layout_for(device, native)
    longest = _max_model_len(max_model_len, config)
    if attention_backend not in ATTENTION_BACKENDS:
        why = f"{attention_backend!r} is not supported; use one of {', '.join(ATTENTION_BACKENDS)}"
        raise ConfigError("attention_backend", why)
    if attention_backend != "auto" and index is None:
        raise ConfigError("attention_backend", f"{attention_backend} computes on GPUs, with device {device} use auto")
    recorded = None if enforce_eager else largest
    needs = MemoryNeeds.of(config, layout, run_dtype, block_tokens)
    if index is not None and backend is None:
        meter, beside_bytes = CudaMeter(index), 0
        if largest is not None:
            beside_bytes = beside(
                open_cuda(index), meter, needs, config, longest, largest, peers, recorded, attention_backend
            )
        if device_memory_bytes is None:
            device_memory_bytes = fitting_budget(meter, gpu_memory_utilization, beside_bytes + links_bytes)
            if peers is not None:
                device_memory_bytes = peers.least(device_memory_bytes)
    if device_memory_bytes is None:
        raise ConfigError("device_memory_bytes", f"has to be said for device {device}")
    memory = needs.open(backend or _backend(device), device_memory_bytes)
    try:
        load_parameters(model_dir, config, memory.parameters, layout, native, compute_here)
        grammars = _grammars(model_dir, config) if not config.rank else None  # only the first rank samples
        model, attention, sampler, runner = _assemble(
            config, memory, native, longest, grammars, peers, recorded, attention_backend
        )
    except BaseException:
        memory.close()
        raise
    layer_bytes = tuple(memory.parameters.size_bytes_of(i) * config.rank_count for i in range(config.layer_count))
    info = ModelInfo(
        name=name or model_dir.resolve().name,
        architecture=config.architecture,
        layer_count=config.layer_count,
        vocab_size=config.vocab_size,
        max_model_len=longest,
        dtype=str(run_dtype).removeprefix("torch."),
        parameter_count=parameter_count(whole),
        kv_bytes_per_token=memory.kv.geometry.kv_bytes_per_token * config.rank_count,
        eos_token_ids=config.eos_token_ids,
        layer_parameter_bytes=layer_bytes,
        other_parameter_bytes=memory.parameters.other_bytes * config.rank_count,
        block_bytes=memory.kv.shape.block_bytes * config.rank_count,
        tensor_parallel_size=config.rank_count,
        revision=revision_of(model_dir),
    )
    return Engine(
        info, model_dir, config, memory, model, native, step_threads, attention, sampler, runner, grammars, compute_here
    )


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a model has in a device's memory."""

    layers: Sequence[PartSpec]
    others: Mapping[str, PartSpec]
    kv_shape: KvShape

    @classmethod
    def of(cls, config: ModelConfig, layout: Layout, dtype: torch.dtype, block_tokens: int) -> Self:
        return cls(
            layers=[part_specs(layer_parameters(config, i, layout), dtype) for i in range(config.layer_count)],
            others={name: part_specs(part, dtype) for name, part in end_parameters(config, layout).items()},
            kv_shape=KvShape(
                layer_count=config.layer_count,
                block_tokens=block_tokens,
                kv_heads=config.kv_head_count,
                head_dim=config.head_dim,
                dtype=dtype,
            ),
        )

    def open(self, backend: MemoryBackend, budget_bytes: int) -> DeviceMemory:
        return DeviceMemory.open(
            backend, budget_bytes=budget_bytes, layers=self.layers, others=self.others, kv_shape=self.kv_shape
        )

    def least_bytes(self, granularity_bytes: int, block_count: int) -> int:
        """For all parameters and so many blocks, with what is lost to whole extents."""
        layers = [lay_out(f"layers.{i}", specs).size_bytes for i, specs in enumerate(self.layers)]
        others = [lay_out(name, specs).size_bytes for name, specs in self.others.items()]
        kv_bytes = self.kv_shape.layer_count * block_count * self.kv_shape.block_bytes
        lost_bytes = (2 * len(layers) + len(others)) * (max(layers) // 8 + 2 * granularity_bytes)
        return sum(layers) + sum(others) + kv_bytes + lost_bytes


def beside(
    backend: MemoryBackend,
    meter: Meter,
    needs: MemoryNeeds,
    config: ModelConfig,
    longest: int,
    largest: Largest,
    peers: Peers | None = None,
    recorded: Largest | None = None,
    attention_backend: str = "auto",
) -> int:
    """What the largest steps take beside parameters and KV: activations, the sampler's tables, and what libraries and
    compiled kernels keep. torch's allocator keeps it for them. The backend is closed afterwards.

    Raises:
        ConfigError: the device has not the memory for parameters and one such step.
    """
    block_tokens = needs.kv_shape.block_tokens
    block_count = blocks_needed(largest, block_tokens, longest)
    with needs.open(backend, needs.least_bytes(backend.granularity_bytes, block_count)) as memory:
        free_bytes = meter.free_bytes()
        for part in (*range(len(needs.layers)), *needs.others):
            tensors = memory.parameters.layer(part) if isinstance(part, int) else memory.parameters.part(part)
            for tensor in tensors.values():
                tensor.zero_()
        try:
            *_, runner = _assemble(config, memory, None, longest, None, peers, recorded, attention_backend)
            rehearse(runner, largest, block_tokens, longest)
        except torch.OutOfMemoryError as error:
            why = f"a step of {largest.tokens} tokens does not fit beside the parameters: {error}"
            raise ConfigError("max_num_batched_tokens", why) from error
        return max(0, free_bytes - meter.free_bytes())


def _assemble(
    config: ModelConfig,
    memory: DeviceMemory,
    native: Kernels | None,
    longest: int,
    grammars: Grammars | None,
    peers: Peers | None,
    recorded: Largest | None,
    attention_backend: str,
) -> tuple[Model | PackedModel, AttentionBackend, AnySampler, ModelRunner]:
    dtype, device = memory.kv.shape.dtype, memory.pool.backend.device
    if native is not None:
        model = PackedModel(config, memory.parameters, memory.kv, native, max_model_len=longest)
        attention = PagedAttention(native)
    else:
        sum_over_ranks = None if peers is None else peers.sum
        model = Model(config, memory.parameters, memory.kv, max_model_len=longest, sum_over_ranks=sum_over_ranks)
        attention = _attention(device, config, dtype, attention_backend)
    sampler = _sampler(device, config, grammars, native)
    graphs, record = None, recorder(device)
    # What FlashInfer plans on the host for each step is not recorded.
    if recorded is not None and record is not None and isinstance(attention, CudaAttention):
        assert isinstance(model, Model)
        graphs = DecodeGraphs(
            model,
            attention,
            record,
            tokens=recorded.tokens,
            sequences=recorded.sequences,
            longest=longest,
            block_tokens=memory.kv.shape.block_tokens,
        )
    return model, attention, sampler, ModelRunner(config, model, attention, sampler, memory.kv, graphs)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy; locked in memory where a device reads it several times as fast then."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)


def _from_host(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _set_threads(threads: int | None, native: Kernels | None) -> int:
    if threads is None:
        return torch.get_num_threads() if native is None else native.threads
    torch.set_num_threads(threads if native is None else 1)  # its own wait in a loop, and have little to do then
    if native is not None:
        native.threads = threads
    return threads


def _grammars(model_dir: Path, config: ModelConfig) -> Grammars | None:
    """None without a tokenizer: such a model serves token ids only."""
    file = model_dir / "tokenizer.json"
    return Grammars(file, config.vocab_size, config.eos_token_ids) if file.is_file() else None


def _dtype(name: str, config: ModelConfig, model_dir: Path) -> torch.dtype:
    if name != "auto":
        if name not in DTYPES:
            raise ConfigError("dtype", f"{name!r} is not supported; use auto or one of {', '.join(DTYPES)}")
        return DTYPES[name]
    stored = config.checkpoint_dtype or "float32"
    if stored not in DTYPES:
        raise ConfigError(
            f"{model_dir / 'config.json'}: dtype",
            f"{stored!r} cannot be run as it is; choose one of {', '.join(DTYPES)}",
        )
    return DTYPES[stored]


def _max_model_len(wanted: int | None, config: ModelConfig) -> int:
    if wanted is None:
        return config.max_position
    if not 1 <= wanted <= config.max_position:
        raise ConfigError(
            "max_model_len", f"must be between 1 and {config.max_position}, the model's limit, got {wanted}"
        )
    return wanted


def _backend(device: str) -> MemoryBackend:
    index = gpu_index(device)
    return HostBackend() if index is None else open_cuda(index)


def _attention(device: torch.device, config: ModelConfig, dtype: torch.dtype, name: str) -> AttentionBackend:
    if device.type != "cuda":
        return CpuAttention(config.head_count, config.kv_head_count, config.head_dim, dtype)
    kind = FlashInferAttention if name == "flashinfer" else CudaAttention
    return kind(config.head_count, config.kv_head_count, config.head_dim, dtype, device)


def _sampler(
    device: torch.device, config: ModelConfig, grammars: Grammars | None, native: Kernels | None
) -> AnySampler:
    if device.type == "cuda":
        return GpuSampler(config.vocab_size, config.eos_token_ids, device, grammars)
    return Sampler(config.vocab_size, config.eos_token_ids, device, grammars, native)
