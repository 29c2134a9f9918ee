"""Settings of a worker. Flag names follow vLLM where it has the same setting."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import ByteSize, Field, field_validator, model_validator
from pydantic_settings import CliImplicitFlag

from ballast.common.overload import OverloadPolicy
from ballast.common.sampling import PriorityClass
from ballast.common.targets import Targets, read_by_class
from ballast.service.security import ServiceSettings


class WorkerSettings(ServiceSettings):
    service: ClassVar[str] = "worker"
    summary: ClassVar[str] = "One instance of the model: holds its parameters and generates tokens."
    developer: ClassVar[frozenset[str]] = frozenset(
        {
            "admission_reserve_fraction",
            "microbatching",
            "transfers",
            "check_every_steps",
            "swap_blocks_per_step",
            "activation_log_bytes",
            "self_profile_s",
            "report_interval_s",
            "link_bytes_per_s",
            "max_num_queued_tokens",
            "step_timeout_s",
            "async_scheduling",
            "batch_invariant",
        }
    )
    short_flags: ClassVar[Mapping[str, str]] = {"shutdown-timeout-s": "shutdown-timeout"}

    # Addresses.
    port: int = Field(50061, ge=0, le=65535)
    """Port to listen on; 0: any free one."""
    data_port: int = Field(0, ge=0, le=65535)
    """Port for links from other workers; 0: any free one. Set it if a firewall or a network policy must allow it."""
    monitor_address: str | None = None
    """HOST:PORT of the monitor. Default: looked up in the state server."""
    worker_id: str | None = Field(None, min_length=1, max_length=128)
    """Name of this worker, which stays the same over restarts. Default: machine and port."""
    report_interval_s: float = Field(0.1, gt=0, le=60)
    """Seconds between two load reports."""

    # Model.
    model: Path
    """Folder of a Hugging Face checkpoint, or org/name[@revision] to download from a hub."""
    engine: Literal["torch", "emulated"] = "torch"
    """torch computes the model; emulated computes nothing and takes as long as a profile states."""
    profile: Path | None = None
    """With the emulated engine: a file with measured durations."""
    served_model_name: str | None = None
    """Name of the model for clients. Default: the folder's name, or org/name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Number format of parameters and, unless --kv-cache-dtype says otherwise, of KV; auto: the checkpoint's own."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    """Number format of KV: fp8 (the same as fp8_e4m3) takes half the memory of bfloat16, with a precision of 3 bits and
    the scales of the checkpoint, if any; auto: that of --dtype. The same for all workers of a cluster. Not with
    FlashInfer."""
    model_impl: Literal["auto", "ballast", "transformers"] = "auto"
    """What computes the model: Ballast's own classes (ballast), or the modelling code of transformers with Ballast's KV
    memory (transformers). auto: Ballast's classes if they support the model, else transformers."""
    lora_modules: dict[str, Path] = Field(default_factory=dict[str, Path])
    """LoRA adapter served alongside the model, NAME=FOLDER; may be repeated. Requests select it by name as their model.
    The same for all workers of a cluster."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:(\d+|auto))?)$")
    """Where to compute: cpu, cuda (the first GPU), cuda:N, or cuda:auto, the first that no other worker has claimed."""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """Ranks that compute one instance, each on its own device, counted from --device on. Heads and MLP are split among
    them. The same for all workers of a cluster. On CPUs this implies --kernels torch."""
    nnodes: int = Field(1, ge=1, le=64)
    """Hosts of one instance, each with an equal part of --tensor-parallel-size."""
    node_rank: int = Field(0, ge=0)
    """Index of this host among them. The worker runs on host 0. Other hosts only run their ranks and need --model and
    --device; all other settings come from host 0."""
    dist_init_addr: str | None = Field(None, pattern=r"^.+:\d{1,5}$")
    """With several hosts: HOST:PORT of host 0, to which the ranks of the other hosts connect."""
    device_memory_bytes: ByteSize = Field(ByteSize(1 << 30), gt=0)
    """Memory of each rank for parameters and KV cache together, such as 512MiB or 16GiB."""
    host_copy: str = Field("off", pattern=r"^(auto|off|\d+)$")
    """Bytes of host memory (/dev/shm) for one copy of the parameters, shared by all workers of this host with the same
    model. The first worker makes it; others load from it when they start, restore layers or lose a peer. auto: if a
    tenth of the memory remains available; off: no copy. Not with several ranks, or transformers' code."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory for everything, if --device-memory-bytes does not set what parameters and KV get."""
    enforce_eager: CliImplicitFlag[bool] = False
    """On a GPU, launch kernels one by one instead of capturing decode steps as CUDA graphs."""
    attention_backend: Literal["auto", "triton", "flashinfer"] = "auto"
    """Attention kernels on a GPU: Ballast's own (triton) or those of FlashInfer, an optional extra that implies
    --enforce-eager. auto: triton, since we have not run FlashInfer on a GPU."""
    batch_invariant: bool = False
    """On a GPU, use matrix kernels with fixed tiles, so that a request's tokens do not depend on the rest of its batch;
    slower. Not with FlashInfer, several ranks, adapters or transformers' code. CPUs always compute like this."""
    block_size: int = Field(16, ge=1, le=1024)
    """Tokens of one KV block."""
    max_model_len: int | None = Field(None, ge=2)
    """Maximum tokens of a prompt and its answer together. Default: the model's own."""

    # Scheduling.
    max_num_seqs: int | None = Field(None, ge=1, le=4096)
    """Maximum running requests. Default: 64 on CPUs; on a GPU 256, or 512 from 70 GiB of memory on."""
    tpot_target_s: str | None = None
    """Target for the average time per output token, in seconds. No more requests are admitted than meet it, according
    to the costs that a worker learns; others wait. One number (0.05), or one per class (interactive=0.03,default=0.1),
    or a JSON file with such an object. The strictest target among running requests applies. Default: none."""
    ttft_target_s: str | None = None
    """Target for the time to first token, in seconds, in the same formats. Offline work (class batch) never delays a
    first token beyond it; see also --preempt-within-step. Default: none."""
    preempt_within_step: Literal["auto", "off"] = "auto"
    """Whether a step that contains only offline work yields to an online request between two slices of layers. auto: if
    such a step takes more than a quarter of --ttft-target-s; off: it runs to its end."""
    offline_slowdown: float = Field(0.25, ge=0, le=10)
    """Fraction by which offline requests (class batch) may lengthen a step of online decodes if --tpot-target-s sets no
    bound; 0: they are added only if that costs no time. A step with an online prompt that has no target for its first
    token is not lengthened."""
    max_num_batched_tokens: int | None = Field(None, ge=1, le=1 << 20)
    """Maximum tokens of one engine step. Default: 512 on CPUs; on a GPU 2048, 4096 from 70 GiB of memory on, 8192 from
    160 GiB on; never fewer than --max-num-seqs."""
    max_num_queued_reqs: int | None = Field(None, ge=1, le=1 << 16)
    """Maximum requests that wait on this worker; most wait in the dispatcher's backlog. Default: 64 on CPUs,
    --max-num-seqs on a GPU.
    """
    max_num_queued_tokens: int = Field(1 << 20, ge=1)
    """Maximum prompt tokens that wait on this worker."""
    admission_reserve_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the KV blocks reserved for the growth of running requests."""
    async_scheduling: Literal["auto", "on", "off"] = "auto"
    """Whether a step is launched before the tokens of the previous one are known, so that a GPU never waits for the
    host; a token then reaches its client one launch later. auto: on for GPUs, off for CPUs, where one thread schedules
    and computes."""
    microbatching: Literal["token-count", "lookahead"] = "lookahead"
    """How work is divided into microbatches of a pipeline: of equal predicted cost (lookahead), or of equal token
    counts (token-count).
    """
    enable_prefix_caching: CliImplicitFlag[bool] = True
    """Compute the KV of a shared prompt prefix once, in whole blocks, and cache it until the memory is needed."""
    transfers: Literal["coordinated", "naive"] = "coordinated"
    """How KV and layers are transferred: at lower priority than activations (coordinated), or in one queue with them
    (naive, as a baseline for measurements)."""
    transport: Literal["auto", "tcp", "nccl"] = "auto"
    """Transport of the links between workers, the same for all workers of a cluster. auto: NCCL between GPUs, else TCP.
    Two workers on one GPU need tcp."""
    link_bytes_per_s: ByteSize | None = Field(None, gt=0)
    """Emulate links of this speed in bytes per second, such as 1GB. Default: no limit."""
    overload_policy: OverloadPolicy = OverloadPolicy.DROP
    """What to do when KV memory runs short. With swap, preempted requests keep their KV in host memory."""
    fallback_policy: Literal["recompute", "swap"] = "recompute"
    """With --overload-policy drop, what happens to a request that is preempted all the same: its KV is recomputed
    (recompute), or copied to host memory and back (swap).
    """
    swap_space_bytes: ByteSize = Field(ByteSize(1 << 30), ge=0)
    """Host memory for KV of preempted requests (of offline ones with any policy) and, with prefix caching, for prefixes
    evicted from the device. 0: such KV is recomputed."""
    activation_log_bytes: ByteSize = Field(ByteSize(0), ge=0)
    """Host memory in which a stage of a pipeline stores the activations that it has sent to the next stage, about 5 %
    of their KV. If that stage is lost, a stand-in computes only the lost layers. 0: the group's requests are
    recomputed."""
    swap_blocks_per_step: int = Field(0, ge=0)
    """Maximum KV blocks swapped out and in during one step; 0: as many as the step hides."""
    threads: int = Field(1, ge=1, le=1024)
    """Threads that compute one engine step."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """The compiled kernels (native) or torch's; auto: native if possible."""

    # Known speed as a pipeline stage.
    cost_profile: Path | None = None
    """A file from `ballast profile`, made for this model on this machine. Without one, a worker learns its speed while
    it serves."""
    self_profile_s: float = Field(0.0, ge=0, le=600)
    """Measure for about this many seconds at the start, instead of reading a file."""

    # Shutdown.
    shutdown_timeout_s: float = Field(30.0, ge=0)
    """When the worker is stopped: maximum seconds for running requests to finish, and for its pipeline to continue
    without it."""
    step_timeout_s: float = Field(60.0, gt=0)
    """Seconds after which a hanging engine step makes the worker not ready."""

    otlp_traces_endpoint: str | None = Field(None, pattern=r"^https?://")
    """Collector for spans of requests: http://HOST:4318, OTLP over HTTP. Default: none."""

    check_every_steps: int = Field(0, ge=0)
    """Check all invariants every this many steps; 0: never. For tests and debugging; a check costs more than a step."""

    @field_validator("tpot_target_s", "ttft_target_s")
    @classmethod
    def _is_read(cls, given: str | None) -> str | None:
        read_by_class(given)
        return given

    @model_validator(mode="after")
    def _can_be_adapted(self) -> Self:
        if self.lora_modules and self.tensor_parallel_size > 1:
            raise ValueError("lora_modules: adapters need --tensor-parallel-size 1")
        if self.lora_modules and self.engine == "emulated":
            raise ValueError("lora_modules: an emulated engine computes no adapters")
        return self

    @model_validator(mode="after")
    def _can_store_kv(self) -> Self:
        if self.kv_cache_dtype != "auto" and self.attention_backend == "flashinfer":
            raise ValueError("kv_cache_dtype: not with FlashInfer, use --attention-backend auto")
        return self

    @model_validator(mode="after")
    def _has_hosts(self) -> Self:
        if self.nnodes > 1 and self.dist_init_addr is None:
            raise ValueError("dist_init_addr: required with --nnodes: HOST:PORT of host 0")
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank: must be below --nnodes {self.nnodes}, got {self.node_rank}")
        if self.tensor_parallel_size % self.nnodes:
            raise ValueError(
                f"nnodes: {self.nnodes} does not divide --tensor-parallel-size {self.tensor_parallel_size}"
            )
        if self.nnodes > 1 and self.engine == "emulated":
            raise ValueError("nnodes: an emulated engine has no ranks")
        return self

    @property
    def targets(self) -> Mapping[PriorityClass, Targets]:
        """Latency targets by online class."""
        ttft, tpot = read_by_class(self.ttft_target_s), read_by_class(self.tpot_target_s)
        return {each: Targets(ttft.get(each, math.inf), tpot.get(each, math.inf)) for each in {*ttft, *tpot}}

    @property
    def launches(self) -> bool:
        """True if steps are launched before the tokens of the previous ones are known."""
        wanted = self.device != "cpu" if self.async_scheduling == "auto" else self.async_scheduling == "on"
        return self.engine == "torch" and wanted

    @property
    def swaps(self) -> bool:
        """True if preempted online requests are swapped to host memory."""
        policy = self.overload_policy
        is_fallback = policy is OverloadPolicy.DROP and self.fallback_policy == "swap"
        return bool(self.swap_space_bytes) and (policy is OverloadPolicy.SWAP or is_fallback)
