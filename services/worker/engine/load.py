"""Builds an engine from a checkpoint folder."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import torch

from ballast.common.errors import ConfigError
from ballast.common.load import MemoryReport
from ballast.common.model import Adapter, ModelInfo
from ballast.common.units import human_bytes
from ballast.service.grammar import Grammars
from ballast.service.logs import get_logger
from services.worker.core.batch import Batch, StepResult
from services.worker.engine import from_host
from services.worker.engine.attention import AttentionBackend
from services.worker.engine.attention_cuda import CudaAttention
from services.worker.engine.checkpoint import revision_of
from services.worker.engine.choice import choose_model
from services.worker.engine.decode_graphs import DecodeGraphs, recorder
from services.worker.engine.implementation import Implementation, StageModel
from services.worker.engine.kernels import bound_kernel_caches
from services.worker.engine.kv_dtype import kv_dtype_name
from services.worker.engine.lora import Adaptable, Lora, bytes_of
from services.worker.engine.lora_files import AdapterFiles, read_adapters
from services.worker.engine.model_config import ModelFacts
from services.worker.engine.native.library import Kernels
from services.worker.engine.peers import Peers
from services.worker.engine.rehearsal import CudaMeter, Largest, Meter, blocks_needed, fitting_budget, rehearse
from services.worker.engine.runner import ModelRunner
from services.worker.engine.sampler import AnySampler, Sampler
from services.worker.engine.sampler_gpu import GpuSampler
from services.worker.memory.backend import MemoryBackend, dtype_name
from services.worker.memory.cuda import open_cuda
from services.worker.memory.device import DeviceMemory
from services.worker.memory.gpus import gpu_index
from services.worker.memory.host import HostBackend
from services.worker.memory.host_copy import HostCopy
from services.worker.memory.streams import own_stream

DEFAULT_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model, its memory and the runner that executes its steps. Close it when done."""

    info: ModelInfo
    implementation: Implementation
    config: ModelFacts
    memory: DeviceMemory
    model: StageModel
    kernels: Kernels | None  # None: torch is used
    threads: int  # threads that compute a step
    attention: AttentionBackend
    sampler: AnySampler
    runner: ModelRunner
    grammars: Grammars | None  # None: the model has no tokenizer
    compute_here: Callable[[], None]  # must be called by a thread before it runs steps; the loading thread has done so
    host_copy: HostCopy = field(default_factory=lambda: HostCopy(_to_host, _from_host))

    @property
    def block_tokens(self) -> int:
        return self.memory.kv.shape.block_tokens

    @property
    def block_count(self) -> int:
        return self.memory.kv.block_count

    def step(self, batch: Batch, block_tables: Sequence[Sequence[int]]) -> StepResult:
        """Execute a batch on the whole model; see `ModelRunner.step`."""
        return self.runner.step(batch, block_tables)

    def holds_layer(self, layer: int) -> bool:
        """Whether a copy of the layer is in host memory. Callable from any thread."""
        return self.host_copy.holds(layer)

    def read_layer(self, layer: int) -> bool:
        """Reload a layer's parameters from the copy in host memory (True), or else from the checkpoint (False).
        Callable from any thread; the layer must not be executed while it is read.
        """
        if self.host_copy.fill(self.memory.parameters, layer):
            return True
        self.implementation.read_layer(self.memory.parameters, layer)
        return False

    def keep_layer(self, layer: int) -> None:
        """Copy a layer's parameters to host memory. Callable from any thread."""
        self.host_copy.keep(self.memory.parameters, layer)

    def memory_report(self) -> MemoryReport:
        return self.memory.report()

    def check(self) -> None:
        """Raise InvariantViolation unless all device memory is accounted for (I3)."""
        self.memory.check()

    def close(self) -> None:
        """Return all device memory. The runner must not be stepped afterwards. Idempotent."""
        self.host_copy.close()
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
    model_impl: str = "auto",
    host_copy: str = from_host.OFF,
    lora_modules: Mapping[str, Path] | None = None,
    batch_invariant: bool = False,
    kv_cache_dtype: str = "auto",
) -> Engine:
    """Load a checkpoint into one device's memory.

    `model_impl`: "ballast": our own classes; "transformers": its modelling code over our memory; "auto": our own
    classes if they support the model.

    `dtype`: "auto": the checkpoint's own. `max_model_len`: None: the model's maximum. `threads`: number of threads that
    compute a step, set for the whole process (None: unchanged). `kernels`: "native": the compiled ones; "torch":
    torch's; "auto": the compiled ones if possible. `backend`: replaces the default memory backend of the device.

    On a GPU the `largest` steps are run before the parameters are loaded, to measure their memory, which is reserved.
    Without `device_memory_bytes`, parameters and KV get the `gpu_memory_utilization` share of the device, less the
    memory of these steps and `links_bytes` for links.

    On a GPU decode-only steps of up to the `largest` number of rows are recorded as CUDA graphs unless `enforce_eager`
    is set. `attention_backend`: "triton": our own kernels, also the choice of "auto"; "flashinfer": FlashInfer's, which
    have not been run on a GPU, without CUDA graphs.

    `host_copy`: "off", "auto" or its maximum size in bytes. Unless off, the parameters are loaded from a copy in this
    host's memory, which is made if no worker has made it yet.

    `lora_modules`: folders of LoRA adapters, by name. Their memory is part of the budget.

    `batch_invariant`: on a GPU, use matrix products whose results do not depend on the other rows of a step.

    `kv_cache_dtype`: "fp8_e4m3": KV is stored in float8; "auto": in the model's dtype.

    With `peers` this is one rank of a tensor-parallel instance and loads its share; reported facts of the model cover
    all ranks.

    Raises:
        ConfigError: the checkpoint cannot be served with these settings, or the device lacks the memory.
    """
    bound_kernel_caches()
    index = gpu_index(device)
    compute_here = own_stream(torch.device("cpu") if index is None else torch.device("cuda", index))
    compute_here()  # torch's allocator keeps the memory of the largest steps for the stream they run on
    if index is not None:  # makes cuBLAS reduce split products in float32
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    served, native = choose_model(
        model_dir,
        model_impl=model_impl,
        dtype=dtype,
        device=device,
        kernels=kernels,
        max_model_len=max_model_len,
        peers=peers,
        attention_backend=attention_backend,
        adapted=bool(lora_modules),
        batch_invariant=batch_invariant,
        kv_cache_dtype=kv_cache_dtype,
    )
    adapters = read_adapters(lora_modules, served.linears) if lora_modules else []
    config, needs = served.config, served.needs(block_tokens)
    step_threads = _set_threads(threads, native)
    longest = _max_model_len(max_model_len, config)
    recorded = None if enforce_eager else largest
    if index is not None and backend is None:
        meter, beside_bytes = CudaMeter(index), 0
        if largest is not None:
            beside_bytes = beside(open_cuda(index), meter, served, block_tokens, longest, largest, recorded)
            gc.collect()
            torch.cuda.empty_cache()  # frees the recordings made for the measurement
        if device_memory_bytes is None:
            device_memory_bytes = fitting_budget(meter, gpu_memory_utilization, beside_bytes + links_bytes)
            if peers is not None:
                device_memory_bytes = peers.least(device_memory_bytes)
    if device_memory_bytes is None:
        raise ConfigError("device_memory_bytes", f"is required for device {device}")
    adapter_bytes = bytes_of(adapters, served.dtype, config.rank_count)
    memory, shared = needs.open(backend or _backend(device), device_memory_bytes - adapter_bytes), None
    try:
        shared = from_host.load(served, memory, compute_here, model_dir, host_copy if peers is None else from_host.OFF)
        grammars = _grammars(model_dir, config) if not config.rank else None  # only the first rank samples
        lora = _load_adapters(adapters, served, memory.pool.backend.device)
        model, attention, sampler, runner = _assemble(served, memory, native, longest, grammars, recorded, lora)
        with torch.inference_mode():
            served.check(model, attention, memory.kv)
    except BaseException:
        if shared is not None:
            shared.close()
        memory.close()
        raise
    layer_bytes = tuple(memory.parameters.size_bytes_of(i) * config.rank_count for i in range(config.layer_count))
    info = ModelInfo(
        name=name or model_dir.resolve().name,
        architecture=config.architecture,
        layer_count=config.layer_count,
        vocab_size=config.vocab_size,
        max_model_len=longest,
        dtype=dtype_name(served.dtype),
        kv_cache_dtype=kv_dtype_name(needs.kv_shape.dtype, served.dtype),
        parameter_count=served.parameter_count,
        kv_bytes_per_token=memory.kv.geometry.kv_bytes_per_token * config.rank_count,
        eos_token_ids=config.eos_token_ids,
        layer_parameter_bytes=layer_bytes,
        other_parameter_bytes=memory.parameters.other_bytes * config.rank_count,
        block_bytes=memory.kv.shape.block_bytes * config.rank_count,
        tensor_parallel_size=config.rank_count,
        revision=revision_of(model_dir),
        adapters=tuple(Adapter(one.name, one.revision) for one in adapters),
    )
    return Engine(
        info,
        served,
        config,
        memory,
        model,
        native,
        step_threads,
        attention,
        sampler,
        runner,
        grammars,
        partial(_warm_up_on_thread, compute_here, memory.pool.backend.device),
        HostCopy(_to_host, _from_host, shared),
    )


def beside(
    backend: MemoryBackend,
    meter: Meter,
    served: Implementation,
    block_tokens: int,
    longest: int,
    largest: Largest,
    recorded: Largest | None = None,
) -> int:
    """Measure the memory that the largest steps need besides parameters and KV: activations, the sampler's tables, and
    memory held by libraries and compiled kernels. torch's allocator keeps it reserved. Closes the backend.

    Raises:
        ConfigError: parameters and one such step do not fit into the device's memory.
    """
    needs = served.needs(block_tokens)
    block_count = blocks_needed(largest, block_tokens, longest)
    with needs.open(backend, needs.least_bytes(backend.granularity_bytes, block_count)) as memory:
        free_bytes = meter.free_bytes()
        for part in (*range(len(needs.layers)), *needs.others):
            tensors = memory.parameters.layer(part) if isinstance(part, int) else memory.parameters.part(part)
            for tensor in tensors.values():
                tensor.zero_()
        try:
            *_, runner = _assemble(served, memory, None, longest, None, recorded)
            rehearse(runner, largest, block_tokens, longest)
        except torch.OutOfMemoryError as error:
            why = f"a step of {largest.tokens} tokens does not fit in addition to the parameters: {error}"
            raise ConfigError("max_num_batched_tokens", why) from error
        return max(0, free_bytes - meter.free_bytes())


def _assemble(
    served: Implementation,
    memory: DeviceMemory,
    native: Kernels | None,
    longest: int,
    grammars: Grammars | None,
    recorded: Largest | None,
    lora: Lora | None = None,
) -> tuple[StageModel, AttentionBackend, AnySampler, ModelRunner]:
    config, device = served.config, memory.pool.backend.device
    model, attention = served.assemble(memory, native, longest)
    if lora is not None:
        cast(Adaptable, model).adapt(lora)
    sampler = _sampler(device, config, grammars, native)
    graphs, record = None, recorder(device)
    # FlashInfer plans each step on the host, which a graph cannot contain.
    if recorded is not None and record is not None and isinstance(attention, CudaAttention):
        graphs = DecodeGraphs(
            model,
            attention,
            record,
            tokens=recorded.tokens,
            sequences=recorded.sequences,
            longest=longest,
            block_tokens=memory.kv.shape.block_tokens,
        )
    return model, attention, sampler, ModelRunner(config, model, attention, sampler, memory.kv, graphs, lora)


def _load_adapters(adapters: Sequence[AdapterFiles], served: Implementation, device: torch.device) -> Lora | None:
    dtype, config = served.dtype, served.config
    for one in adapters:
        size = human_bytes(bytes_of([one], dtype, config.rank_count))
        get_logger().info("adapter", name=one.name, rank=one.rank, modules=len(one.ranks), memory=size)
    return Lora(adapters, dtype, device, config.rank, config.rank_count) if adapters else None


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to host memory; page-locked if copied from a GPU, which makes reading it back several times as fast."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)


def _from_host(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _set_threads(threads: int | None, native: Kernels | None) -> int:
    if threads is None:
        return torch.get_num_threads() if native is None else native.threads
    torch.set_num_threads(threads if native is None else 1)  # torch's threads would busy-wait alongside ours
    if native is not None:
        native.threads = threads
    return threads


def _grammars(model_dir: Path, config: ModelFacts) -> Grammars | None:
    """Grammars for the model's tokenizer; None: the model has no tokenizer and serves token ids only."""
    file = model_dir / "tokenizer.json"
    return Grammars(file, config.vocab_size, config.eos_token_ids) if file.is_file() else None


def _max_model_len(wanted: int | None, config: ModelFacts) -> int:
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


def _warm_up_on_thread(compute_here: Callable[[], None], device: torch.device) -> None:
    """Create this thread's cuBLAS handle and workspace now instead of in its first step."""
    compute_here()
    if device.type == "cuda":
        some = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(some, some)
        torch.addmm(some[0], some, some)


def _sampler(device: torch.device, config: ModelFacts, grammars: Grammars | None, native: Kernels | None) -> AnySampler:
    if device.type == "cuda":
        return GpuSampler(config.vocab_size, config.eos_token_ids, device, grammars)
    return Sampler(config.vocab_size, config.eos_token_ids, device, grammars, native)
