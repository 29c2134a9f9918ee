"""Settings of a worker. Flag names follow vLLM where it has the same setting."""

import argparse
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ByteSize, Field

from ballast.common.overload import OverloadPolicy
from ballast.service.settings import Settings


class WorkerSettings(Settings):
    service: ClassVar[str] = "worker"

    # Where it listens and whom it knows.
    host: str = "127.0.0.1"
    port: int = Field(50061, ge=0, le=65535)
    advertise_host: str | None = None  # how others reach it; default: `host`, or this machine's name if that is 0.0.0.0
    metrics_host: str = "127.0.0.1"
    metrics_port: int = Field(0, ge=0, le=65535)  # 0: no metrics server
    redis_url: str = "redis://127.0.0.1:6379/0"
    monitor_address: str | None = None  # default: looked up in the state server
    worker_id: str | None = Field(None, min_length=1, max_length=128)  # default: minted from machine and port
    report_interval_s: float = Field(0.1, gt=0, le=60)

    # What it serves.
    model: Path
    engine: Literal["torch", "emulated"] = "torch"  # emulated: nothing is computed, a profile says what it takes
    profile: Path | None = None  # of an emulated engine
    copies: int = Field(1, ge=1, le=256)  # emulated workers in this process, ID.0, ID.1 ...; without metrics if several
    served_model_name: str | None = None  # default: the checkpoint folder's name
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    device_memory_bytes: ByteSize = Field(ByteSize(1 << 30), gt=0)  # parameters + KV cache
    block_size: int = Field(16, ge=1, le=1024)  # tokens of one KV block
    max_model_len: int | None = Field(None, ge=2)  # default: the model's own

    # How it schedules.
    max_num_seqs: int = Field(64, ge=1, le=4096)
    max_num_batched_tokens: int = Field(512, ge=1, le=1 << 20)
    max_num_queued_reqs: int = Field(64, ge=1, le=1 << 16)  # waiting here; the backlog proper is the dispatcher's
    max_num_queued_tokens: int = Field(1 << 20, ge=1)
    admission_reserve_fraction: float = Field(0.05, ge=0, lt=1)  # of the KV blocks, for the growth of what runs
    microbatching: Literal["token-count", "lookahead"] = "lookahead"  # in groups of several stages
    exchange: Literal["stall", "live"] = "stall"  # of KV after a drop: whether victims go on meanwhile
    # How KV and layers travel. naive: whole pieces in one queue with the activations, to measure against.
    transfers: Literal["coordinated", "naive"] = "coordinated"
    link_bytes_per_s: ByteSize | None = Field(None, gt=0)  # emulates slower links; default: as fast as they are
    overload_policy: OverloadPolicy = OverloadPolicy.DROP  # with `swap`, who gives way keeps its KV in host memory
    fallback_policy: Literal["recompute", "swap"] = (
        "recompute"  # with `drop`: of workers that are out of KV all the same
    )
    swap_space_bytes: ByteSize = Field(ByteSize(1 << 30), ge=0)  # host memory for that
    swap_blocks_per_step: int = Field(0, ge=0)  # 0: as many as hide behind a step
    threads: int = Field(1, ge=1, le=1024)  # torch's intra-op threads
    seed: int = 0

    # What it knows of its own speed when it becomes a stage of a pipeline. Without either it learns while it serves.
    cost_profile: Path | None = None  # a file from `ballast profile`
    self_profile_s: float = Field(0.0, ge=0, le=600)  # measure for about so long at the start, without a file

    # How it ends.
    shutdown_timeout_s: float = Field(30.0, ge=0)
    step_timeout_s: float = Field(60.0, gt=0)  # not ready when a step takes longer

    # 1: every step checks all invariants. For tests and for the hunt after a bug; costs more than the step itself.
    check_every_steps: int = Field(0, ge=0)

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"

    @property
    def swaps(self) -> bool:
        """Whether victims keep their KV in host memory."""
        policy = self.overload_policy
        is_fallback = policy is OverloadPolicy.DROP and self.fallback_policy == "swap"
        return bool(self.swap_space_bytes) and (policy is OverloadPolicy.SWAP or is_fallback)


def copy_id(worker_id: str, number: int) -> str:
    """Of one of several workers in a process."""
    return f"{worker_id}.{number}"


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m services.worker",
        description="One instance: holds the model and generates tokens.",
        argument_default=None,
    )
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--advertise-host", metavar="HOST")
    parser.add_argument("--metrics-port", type=int)
    parser.add_argument("--redis-url", metavar="URL")
    parser.add_argument("--monitor-address", metavar="HOST:PORT")
    parser.add_argument("--worker-id", metavar="ID")
    parser.add_argument("--model", metavar="DIR", help="Hugging Face checkpoint folder")
    parser.add_argument("--engine", metavar="ENGINE", help="torch (default), or emulated: takes time, computes nothing")
    parser.add_argument("--profile", metavar="FILE", help="what an emulated engine takes its time by")
    parser.add_argument("--copies", type=int, metavar="N", help="so many emulated workers in this process")
    parser.add_argument("--served-model-name", metavar="NAME")
    parser.add_argument("--dtype", metavar="TYPE", help="auto, float32, bfloat16, float16 or float64")
    parser.add_argument("--device", metavar="DEVICE", help="cpu or cuda")
    parser.add_argument("--device-memory-bytes", metavar="BYTES", help="for parameters and KV cache; 512MiB, 16GiB ...")
    parser.add_argument("--block-size", type=int, metavar="TOKENS")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS")
    parser.add_argument("--max-num-seqs", type=int, metavar="N")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="TOKENS")
    parser.add_argument("--max-num-queued-reqs", type=int, metavar="N")
    parser.add_argument("--max-num-queued-tokens", type=int, metavar="TOKENS")
    parser.add_argument("--admission-reserve-fraction", type=float, metavar="X", help="KV kept free for what runs")
    parser.add_argument("--microbatching", metavar="WAY", help="of pipelines: lookahead (default) or token-count")
    parser.add_argument("--exchange", metavar="WAY", help="of KV after a drop: victims stall (default) or go on, live")
    parser.add_argument(
        "--transfers", metavar="WAY", help="coordinated (default); naive: nothing gives way to anything"
    )
    parser.add_argument("--link-bytes-per-s", metavar="BYTES", help="emulate links of this speed")
    parser.add_argument("--overload-policy", metavar="POLICY", help=f"{', '.join(OverloadPolicy)} (drop)")
    parser.add_argument("--fallback-policy", metavar="POLICY", help="with drop: recompute (default) or swap")
    parser.add_argument("--swap-space-bytes", metavar="BYTES", help="host memory for swapped KV (1GiB)")
    parser.add_argument("--swap-blocks-per-step", type=int, metavar="N", help="0: as many as hide behind a step")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--cost-profile", metavar="FILE", help="from `ballast profile`, of the same model and machine")
    parser.add_argument("--self-profile-s", type=float, metavar="SECONDS", help="measure at the start, without a file")
    parser.add_argument("--shutdown-timeout", type=float, dest="shutdown_timeout_s", metavar="SECONDS")
    parser.add_argument("--log-level", metavar="LEVEL")
    parser.add_argument("--log-format", metavar="FORMAT", help="console or json")
    return parser
