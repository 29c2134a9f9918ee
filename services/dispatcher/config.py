"""Settings of a dispatcher. Flag names follow vLLM where it has the same setting."""

import argparse
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from ballast.service.settings import Settings


class DispatcherSettings(Settings):
    service: ClassVar[str] = "dispatcher"

    # Where it listens and whom it knows.
    host: str = "127.0.0.1"
    port: int = Field(50051, ge=0, le=65535)
    advertise_host: str | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int = Field(0, ge=0, le=65535)
    redis_url: str = "redis://127.0.0.1:6379/0"
    dispatcher_id: str | None = Field(None, min_length=1, max_length=128)  # default: minted at every start
    model: Path  # folder with tokenizer.json and chat template; weights are not read

    # What it takes.
    max_num_queued_reqs: int = Field(2048, ge=1, le=1 << 20)
    max_num_queued_tokens: int = Field(4 << 20, ge=1)
    max_deadline_s: float = Field(3600.0, gt=0)  # of a request that brings none or a longer one
    no_worker_timeout_s: float = Field(30.0, gt=0)  # a request waits so long while there is no worker at all
    client_stall_timeout_s: float = Field(60.0, gt=0)  # a client that reads nothing for so long is given up

    # Where requests go.
    worker_queue_count: int = Field(2, ge=1)  # requests that may wait in a worker when it is full
    large_fraction: float = Field(0.25, gt=0, le=1)  # of a worker's KV blocks: what is larger lets others overtake
    large_patience_s: float = Field(2.0, ge=0)  # for so long
    # A request that waits on a worker for longer is asked back if another one has room: one interval of reports.
    recall_after_s: float = Field(0.1, ge=0)
    growth_tokens: int = Field(64, ge=0)  # room for generation that a request should find
    replay_limit: int = Field(3, ge=0)  # how often a request is started anew after its worker was lost
    # So long one that was handed over waits for the stream to its new worker; that one keeps it for 10 s.
    move_wait_s: float = Field(5.0, gt=0)

    # How it watches.
    layout_poll_s: float = Field(1.0, gt=0)
    connect_timeout_s: float = Field(5.0, gt=0)

    shutdown_timeout_s: float = Field(30.0, ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m services.dispatcher",
        description="Accepts requests, keeps the backlog, picks workers and relays tokens.",
    )
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--advertise-host", metavar="HOST", help="name under which others reach this process")
    parser.add_argument("--metrics-host", metavar="HOST")
    parser.add_argument("--metrics-port", type=int, help="Prometheus metrics; 0: none")
    parser.add_argument("--redis-url", metavar="URL")
    parser.add_argument("--dispatcher-id", metavar="ID")
    parser.add_argument("--model", metavar="DIR", help="folder with tokenizer.json and the chat template")
    parser.add_argument("--max-num-queued-reqs", type=int, metavar="N", help="requests that may wait")
    parser.add_argument("--max-num-queued-tokens", type=int, metavar="N", help="prompt tokens that may wait")
    parser.add_argument("--no-worker-timeout", type=float, dest="no_worker_timeout_s", metavar="SECONDS")
    parser.add_argument("--client-stall-timeout", type=float, dest="client_stall_timeout_s", metavar="SECONDS")
    parser.add_argument("--shutdown-timeout", type=float, dest="shutdown_timeout_s", metavar="SECONDS")
    parser.add_argument("--log-level", metavar="LEVEL")
    parser.add_argument("--log-format", metavar="FORMAT", help="console or json")
    return parser
