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
    """Port for links from other workers; 0: any free one. Fixed where a firewall or a network policy has to know it."""
    monitor_address: str | None = None
    """HOST:PORT of the monitor. Default: looked up in the state server."""
    worker_id: str | None = Field(None, min_length=1, max_length=128)
    """Name of this worker, kept over restarts. Default: machine and port."""
    report_interval_s: float = Field(0.1, gt=0, le=60)
    """Seconds between two load reports."""

    # Model.
    model: Path
    """Folder of a Hugging Face checkpoint, or org/name[@revision] of a hub, from where it is fetched."""
    engine: Literal["torch", "emulated"] = "torch"
    """torch computes; emulated computes nothing and takes the time that a profile says."""
    profile: Path | None = None
    """With the emulated engine: the file that says how long things take."""
    served_model_name: str | None = None
    """Name of the model for clients. Default: the folder's, or org/name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Number format of parameters and, unless --kv-cache-dtype says otherwise, of KV; auto: the checkpoint's own."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    """Number format of KV: fp8 (the same as fp8_e4m3) takes half the memory of bfloat16, with a precision of 3 bits and
    the scales of the checkpoint, if any; auto: that of --dtype. The same for all workers of a cluster. Not with
    FlashInfer."""
    model_impl: Literal["auto", "ballast", "transformers"] = "auto"
    """What computes the model: Ballast's own classes (ballast), or the modelling code of transformers over Ballast's
    memory; auto: Ballast's for the models that they know, else transformers'."""
    lora_modules: dict[str, Path] = Field(default_factory=dict[str, Path])
    """A LoRA adapter that is served beside the model, NAME=FOLDER, several times: requests name it as their model. The
    same for all workers of a cluster."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:(\d+|auto))?)$")
    """Where to compute: cpu, cuda (the first GPU), cuda:N, or cuda:auto, the first that no other worker has claimed."""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """Ranks that compute one instance, each on a device of its own from --device on: heads and MLP are divided. The
    same for all workers of a cluster. On CPUs torch's kernels compute."""
    nnodes: int = Field(1, ge=1, le=64)
    """Hosts of one instance, each with an equal part of --tensor-parallel-size."""
    node_rank: int = Field(0, ge=0)
    """Which of these hosts this is. On 0 the worker runs; on others the ranks that it has there, with --model and
    --device from here and all other settings from host 0."""
    dist_init_addr: str | None = Field(None, pattern=r"^.+:\d{1,5}$")
    """With several hosts: HOST:PORT of host 0, where the ranks of the others find it."""
    device_memory_bytes: ByteSize = Field(ByteSize(1 << 30), gt=0)
    """Memory for parameters and KV cache together, of each rank: 512MiB, 16GiB."""
    host_copy: str = Field("off", pattern=r"^(auto|off|\d+)$")
    """One copy of the parameters in the memory of this host (/dev/shm) for all its workers of the same model: the first
    one makes it, others start from it, and restores and losses read it. auto: where a tenth of the memory stays
    available; a number: bytes that it may take; off: none. Not with several ranks, or transformers' code."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory for everything, where --device-memory-bytes does not say what parameters and KV get."""
    enforce_eager: CliImplicitFlag[bool] = False
    """On a GPU, launch every kernel by itself instead of recording the steps of decodes as CUDA graphs."""
    attention_backend: Literal["auto", "triton", "flashinfer"] = "auto"
    """On a GPU, whose kernels compute attention: Ballast's own (triton) or those of FlashInfer, an extra, with which
    --enforce-eager is implied. auto: triton, since FlashInfer has not been run on a GPU by us."""
    batch_invariant: bool = False
    """On a GPU, multiply by kernels of fixed tiles, so that no request's tokens depend on what else runs: slower. Not
    with FlashInfer, several ranks, adapters or transformers' code. On CPUs it is so anyway."""
    block_size: int = Field(16, ge=1, le=1024)
    """Tokens of one KV block."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest prompt and answer together, in tokens. Default: the model's own."""

    # Scheduling.
    max_num_seqs: int | None = Field(None, ge=1, le=4096)
    """Requests that run at once. Default: 64; on a GPU by its memory 256, from 70 GiB on 512."""
    tpot_target_s: str | None = None
    """Seconds that a token after the first may take on average: no more requests are let in than run within that, by
    the costs that a worker learns; the others wait. 0.05, or by class interactive=0.03,default=0.1, or a JSON file with
    such an object; the strictest of what runs decides. Default: whatever it takes."""
    ttft_target_s: str | None = None
    """Seconds that a first token may take, likewise: offline work (class batch) makes none later than that, and see
    --preempt-within-step. Default: none."""
    preempt_within_step: Literal["auto", "off"] = "auto"
    """Whether a step of offline work alone gives way to an online request between two slices of layers (auto: where
    such a step takes more than a quarter of --ttft-target-s), or runs to its end."""
    offline_slowdown: float = Field(0.25, ge=0, le=10)
    """Share by which a step of online decodes may take longer for offline requests (class batch) in it, where
    --tpot-target-s sets no other bound; 0: they get only what costs nothing. A step with an online prompt that has no
    target for its first token is not slowed down."""
    max_num_batched_tokens: int | None = Field(None, ge=1, le=1 << 20)
    """Tokens of one engine step. Default: 512; on a GPU by its memory 2048, from 70 GiB on 4096, from 160 GiB on 8192;
    never fewer than --max-num-seqs."""
    max_num_queued_reqs: int | None = Field(None, ge=1, le=1 << 16)
    """Requests that may wait here; the backlog proper is the dispatcher's. Default: 64; on a GPU as many as run."""
    max_num_queued_tokens: int = Field(1 << 20, ge=1)
    """Prompt tokens that may wait here."""
    admission_reserve_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the KV blocks kept free for the growth of what runs."""
    async_scheduling: Literal["auto", "on", "off"] = "auto"
    """Whether a step is launched before the tokens of the previous one are known, so that a GPU never waits for the
    host; a token then reaches its client one launch later. auto: on GPUs, not on CPUs, which compute where they
    schedule."""
    microbatching: Literal["token-count", "lookahead"] = "lookahead"
    """How the stages of a pipeline share the work: batches of equal predicted cost (lookahead), or of equal tokens."""
    enable_prefix_caching: CliImplicitFlag[bool] = True
    """Compute KV of equal prompt beginnings once, in whole blocks, and retain it as long as nothing else needs the
    memory."""
    transfers: Literal["coordinated", "naive"] = "coordinated"
    """How KV and layers travel: behind activations (coordinated), or in one queue with them (naive, to measure
    against)."""
    transport: Literal["auto", "tcp", "nccl"] = "auto"
    """What carries links between workers; the same for all of a cluster. auto: NCCL between GPUs, else TCP. Two workers
    on one GPU need tcp."""
    link_bytes_per_s: ByteSize | None = Field(None, gt=0)
    """Emulate links of this speed: 1GB. Default: as fast as they are."""
    overload_policy: OverloadPolicy = OverloadPolicy.DROP
    """What to do when KV memory runs short; with swap, a request that gives way keeps its KV in host memory."""
    fallback_policy: Literal["recompute", "swap"] = "recompute"
    """With drop, where a worker is out of KV all the same: compute again, or swap."""
    swap_space_bytes: ByteSize = Field(ByteSize(1 << 30), ge=0)
    """Host memory for KV: of requests that give way (offline ones with any policy) and, with prefix caching, of prompts
    that the device has no room for any more. 0: they are computed anew."""
    activation_log_bytes: ByteSize = Field(ByteSize(0), ge=0)
    """Host memory in which a stage of a pipeline keeps what it has sent to the next one, some 5 % of the KV: if that
    one is lost, a stand-in computes its layers alone. 0: the group's requests are computed anew."""
    swap_blocks_per_step: int = Field(0, ge=0)
    """KV blocks that are copied there and back during one step; 0: as many as hide behind it."""
    threads: int = Field(1, ge=1, le=1024)
    """Threads that compute one engine step."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """The compiled kernels (native) or torch's; auto: the compiled ones wherever they can be used."""

    # Known speed as a pipeline stage.
    cost_profile: Path | None = None
    """A file from `ballast profile`, of the same model and machine. Without one a worker learns its speed while it
    serves."""
    self_profile_s: float = Field(0.0, ge=0, le=600)
    """Measure for about so many seconds at the start, instead of a file."""

    # Shutdown.
    shutdown_timeout_s: float = Field(30.0, ge=0)
    """Seconds that running requests get to finish, and the others of its pipeline to do without it, when the worker is
    stopped."""
    step_timeout_s: float = Field(60.0, gt=0)
    """Seconds of one engine step after which the worker is not ready."""

    otlp_traces_endpoint: str | None = Field(None, pattern=r"^https?://")
    """Collector for spans of requests: http://HOST:4318, OTLP over HTTP. Default: none."""

    check_every_steps: int = Field(0, ge=0)
    """Check all invariants every so many steps; 0: never. For tests and for the hunt after a bug; costs more than the
    step itself."""

    @field_validator("tpot_target_s", "ttft_target_s")
    @classmethod
    def _is_read(cls, given: str | None) -> str | None:
        read_by_class(given)
        return given

    @model_validator(mode="after")
    def _can_be_adapted(self) -> Self:
        if self.lora_modules and self.tensor_parallel_size > 1:
            raise ValueError("lora_modules: adapters are not divided among ranks, use --tensor-parallel-size 1")
        if self.lora_modules and self.engine == "emulated":
            raise ValueError("lora_modules: an emulated engine computes no adapters")
        return self

    @model_validator(mode="after")
    def _can_store_kv(self) -> Self:
        if self.kv_cache_dtype != "auto" and self.attention_backend == "flashinfer":
            raise ValueError("kv_cache_dtype: FlashInfer has not been tried with it, use --attention-backend auto")
        return self

    @model_validator(mode="after")
    def _has_hosts(self) -> Self:
        if self.nnodes > 1 and self.dist_init_addr is None:
            raise ValueError("dist_init_addr: with --nnodes it says where host 0 is, HOST:PORT")
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
        """True if preempted online requests keep their KV in host memory."""
        policy = self.overload_policy
        is_fallback = policy is OverloadPolicy.DROP and self.fallback_policy == "swap"
        return bool(self.swap_space_bytes) and (policy is OverloadPolicy.SWAP or is_fallback)
