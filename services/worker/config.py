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
    """Name of this worker, the same after a restart. Default: machine and port."""
    report_interval_s: float = Field(0.1, gt=0, le=60)
    """Seconds between two load reports."""

    # Model.
    model: Path
    """Folder of a Hugging Face checkpoint, or org/name[@revision], which is downloaded."""
    engine: Literal["torch", "emulated"] = "torch"
    """torch: compute the model; emulated: compute nothing and take as long as a profile says."""
    profile: Path | None = None
    """With the emulated engine: file with the durations of operations."""
    served_model_name: str | None = None
    """Name of the model for clients. Default: the folder's name, or org/name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Number format of parameters and, by default, of KV; auto: the checkpoint's own."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    """Number format of KV: fp8 (the same as fp8_e4m3) takes half the memory of bfloat16, with 3 bits of mantissa and
    the scales of the checkpoint, if any; auto: the format of --dtype. Must be the same on all workers of a cluster. Not
    with FlashInfer.
    """
    model_impl: Literal["auto", "ballast", "transformers"] = "auto"
    """Implementation of the model: Ballast's own (ballast), or the modelling code of transformers on Ballast's memory;
    auto: Ballast's own for supported architectures, otherwise transformers."""
    lora_modules: dict[str, Path] = Field(default_factory=dict[str, Path])
    """LoRA adapter to serve in addition to the model, NAME=FOLDER; may be repeated. Requests use its name as their
    model. Must be the same on all workers of a cluster."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:(\d+|auto))?)$")
    """Device: cpu, cuda (the first GPU), cuda:N, or cuda:auto, the first GPU that no other worker has claimed."""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """Ranks of one instance, each on its own device from --device on; they share heads and MLP. Must be the same on all
    workers of a cluster. On CPUs it implies torch's kernels."""
    nnodes: int = Field(1, ge=1, le=64)
    """Hosts of one instance; each has an equal part of the ranks."""
    node_rank: int = Field(0, ge=0)
    """Number of this host. Host 0 runs the worker and its ranks; the others run only ranks, with their own --model and
    --device and all other settings from host 0."""
    dist_init_addr: str | None = Field(None, pattern=r"^.+:\d{1,5}$")
    """With several hosts: HOST:PORT at which ranks on other hosts reach host 0."""
    device_memory_bytes: ByteSize = Field(ByteSize(1 << 30), gt=0)
    """Memory budget of each rank for parameters and KV cache: 512MiB, 16GiB."""
    host_copy: str = Field("off", pattern=r"^(auto|off|\d+)$")
    """One copy of the parameters in this host's memory (/dev/shm) for all its workers of the same model. The first
    worker creates it; others start from it, and restores and recovery after losses read it. auto: if a tenth of the
    memory remains available; a number: maximum size in bytes; off: none. Not with several ranks or transformers."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Fraction of a GPU's memory to use in total; ignored if --device-memory-bytes is set."""
    enforce_eager: CliImplicitFlag[bool] = False
    """On a GPU, launch decode kernels one by one instead of capturing CUDA graphs."""
    attention_backend: Literal["auto", "triton", "flashinfer"] = "auto"
    """Attention kernels on a GPU: Ballast's own (triton), or FlashInfer, an extra, which implies --enforce-eager. auto:
    triton, because we have not run FlashInfer on a GPU."""
    batch_invariant: bool = False
    """On a GPU, use matmul kernels with fixed tiles, so that tokens do not depend on other requests in the batch;
    slower. Not with FlashInfer, several ranks, adapters or transformers. On CPUs this always holds."""
    block_size: int = Field(16, ge=1, le=1024)
    """Tokens of one KV block."""
    max_model_len: int | None = Field(None, ge=2)
    """Maximum length of prompt and answer together, in tokens. Default: the model's own."""

    # Scheduling.
    max_num_seqs: int | None = Field(None, ge=1, le=4096)
    """Maximum number of running requests. Default: 64; on a GPU 256, with at least 70 GiB of memory 512."""
    tpot_target_s: str | None = None
    """Target for the mean time per output token, in seconds. Requests are admitted only while the predicted time stays
    within it; the others wait. 0.05, or by class interactive=0.03,default=0.1, or a JSON file with such an object; the
    strictest target of the running requests applies. Default: none."""
    ttft_target_s: str | None = None
    """Target for the time to first token, in the same format: offline requests (class batch) never delay a first token
    beyond it. See also --preempt-within-step. Default: none."""
    preempt_within_step: Literal["auto", "off"] = "auto"
    """Whether an online request may preempt a step of only offline requests between two slices of layers. auto: if such
    a step takes more than a quarter of --ttft-target-s; off: never."""
    offline_slowdown: float = Field(0.25, ge=0, le=10)
    """Without --tpot-target-s: fraction by which offline requests (class batch) may lengthen a step of online decodes;
    0: not at all. A step with an online prompt without a TTFT target is not lengthened."""
    max_num_batched_tokens: int | None = Field(None, ge=1, le=1 << 20)
    """Maximum number of tokens of one engine step. Default: 512; on a GPU 2048, with at least 70 GiB of memory 4096,
    160 GiB 8192; never fewer than --max-num-seqs."""
    max_num_queued_reqs: int | None = Field(None, ge=1, le=1 << 16)
    """Maximum number of requests that wait at this worker, in addition to the dispatchers' backlog. Default: 64; on a
    GPU --max-num-seqs."""
    max_num_queued_tokens: int = Field(1 << 20, ge=1)
    """Maximum number of prompt tokens that wait at this worker."""
    admission_reserve_fraction: float = Field(0.05, ge=0, lt=1)
    """Fraction of the KV blocks reserved for the growth of running requests."""
    async_scheduling: Literal["auto", "on", "off"] = "auto"
    """Whether a step is launched before the tokens of the previous one are known, so that a GPU never waits for the
    host; tokens then reach clients one launch later. auto: on GPUs only."""
    microbatching: Literal["token-count", "lookahead"] = "lookahead"
    """Microbatches of a pipeline: of equal predicted cost (lookahead), or of equal token counts."""
    enable_prefix_caching: CliImplicitFlag[bool] = True
    """Compute the KV of equal prompt prefixes once, in whole blocks, and retain it until its memory is needed."""
    transfers: Literal["coordinated", "naive"] = "coordinated"
    """Transfers of KV and layers: with lower priority than activations (coordinated), or in one queue with them (naive,
    as a baseline)."""
    transport: Literal["auto", "tcp", "nccl"] = "auto"
    """Transport between workers, the same for all workers of a cluster. auto: NCCL between GPUs, otherwise TCP. Two
    workers on one GPU need tcp."""
    link_bytes_per_s: ByteSize | None = Field(None, gt=0)
    """Emulated speed of links: 1GB. Default: their actual speed."""
    overload_policy: OverloadPolicy = OverloadPolicy.DROP
    """Policy when KV memory runs short; with swap, a preempted request keeps its KV in host memory."""
    fallback_policy: Literal["recompute", "swap"] = "recompute"
    """With drop: how requests are preempted if a worker still runs out of KV memory."""
    swap_space_bytes: ByteSize = Field(ByteSize(1 << 30), ge=0)
    """Host memory for the KV of preempted requests (offline ones with any policy) and, with prefix caching, for evicted
    KV of prompts. 0: their KV is recomputed."""
    activation_log_bytes: ByteSize = Field(ByteSize(0), ge=0)
    """Host memory for a log of the activations that a pipeline stage has sent to the next one, about 5 % of the KV. If
    that stage is lost, a stand-in recomputes only its layers. 0: the group's requests are recomputed."""
    swap_blocks_per_step: int = Field(0, ge=0)
    """KV blocks that are swapped in each direction during one step; 0: as many as overlap with it."""
    threads: int = Field(1, ge=1, le=1024)
    """Threads of the engine."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """CPU kernels: compiled (native) or torch's; auto: compiled ones if possible."""

    # Known speed as a pipeline stage.
    cost_profile: Path | None = None
    """File from `ballast profile`, of the same model and machine. Without one a worker learns its costs while it
    serves."""
    self_profile_s: float = Field(0.0, ge=0, le=600)
    """Approximate seconds of measuring costs at startup, instead of using a file."""

    # Shutdown.
    shutdown_timeout_s: float = Field(30.0, ge=0)
    """Seconds for which running requests may finish, and its pipeline may be dissolved, when the worker is stopped."""
    step_timeout_s: float = Field(60.0, gt=0)
    """Seconds after which a hanging engine step makes the worker not ready."""

    otlp_traces_endpoint: str | None = Field(None, pattern=r"^https?://")
    """Collector for spans of requests: http://HOST:4318, OTLP over HTTP. Default: none."""

    check_every_steps: int = Field(0, ge=0)
    """Interval, in steps, of checking all invariants; 0: never. For tests and debugging; a check takes longer than a
    step."""

    @field_validator("tpot_target_s", "ttft_target_s")
    @classmethod
    def _is_read(cls, given: str | None) -> str | None:
        read_by_class(given)
        return given

    @model_validator(mode="after")
    def _can_be_adapted(self) -> Self:
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
