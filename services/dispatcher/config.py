"""Settings of a dispatcher. Flag names follow vLLM where it has the same setting."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from ballast.service.security import ServiceSettings


class DispatcherSettings(ServiceSettings):
    service: ClassVar[str] = "dispatcher"
    summary: ClassVar[str] = "Accepts requests, keeps the backlog, picks workers and relays tokens."
    developer: ClassVar[frozenset[str]] = frozenset(
        {
            "long_wait_s",
            "prefix_marks",
            "growth_tokens",
            "max_deadline_s",
            "max_request_bytes",
            "max_calls_per_connection",
            "replay_limit",
            "request_history_count",
            "client_stall_timeout_s",
            "no_worker_timeout_s",
            "resume",
        }
    )
    short_flags: ClassVar[Mapping[str, str]] = {"shutdown-timeout-s": "shutdown-timeout"}

    # Addresses, credentials and model.
    port: int = Field(50051, ge=0, le=65535)
    """Port to listen on; 0: any free one."""
    dispatcher_id: str | None = Field(None, min_length=1, max_length=128)
    """Name of this replica. Default: generated at every start."""
    tokens_file: Path | None = None
    """File with hashes of the tokens that clients need, written by `ballast tokens`; reloaded when it changes. Default:
    every caller may do everything."""
    model: Path
    """Folder with tokenizer.json and the chat template, or org/name[@revision] to download from a hub; weights are not
    read.
    """
    chat_template: Path | None = None
    """File of a chat template. Default: the model's own."""
    generation_config: str = Field("auto", min_length=1)
    """Sampling parameters of HTTP requests that do not set them. auto: those of the model's generation_config.json;
    ballast: none, so temperature 1 and no bounds; or a folder with another generation_config.json."""

    # Admission.
    max_num_queued_reqs: int = Field(2048, ge=1, le=1 << 20)
    """Maximum requests in the backlog. Others are refused with a retry delay."""
    max_num_queued_tokens: int = Field(4 << 20, ge=1)
    """Maximum prompt tokens in the backlog. Others are refused with a retry delay."""
    max_offline_queued: int = Field(256, ge=1, le=1 << 20)
    """Maximum waiting offline requests (class batch), in addition. Others are refused with a retry delay. Workers
    request them when they have spare capacity."""
    max_calls_per_connection: int = Field(16_384, ge=1, le=1 << 20)
    """Maximum open calls of one connection. Others are refused with a retry delay."""
    max_calls_per_token: int = Field(0, ge=0, le=1 << 20)
    """Maximum open calls of all clients with the same token on this dispatcher, over all connections; 0: no limit."""
    max_connections: int = Field(0, ge=0, le=1 << 20)
    """Maximum open connections; new ones are closed at once. 0: as many as the limit of open files allows, minus those
    that the process needs itself."""
    max_message_bytes: int = Field(9 << 20, ge=1 << 16, le=16 << 20)
    """Maximum size of one request with its prompt; a larger one is refused. A million token ids take 3 MiB. The default
    accepts the longest body that gateways accept by default."""
    max_request_bytes: int = Field(1 << 30, ge=16 << 20)
    """Maximum total bytes of requests over 64 KiB that are being received. Others are refused with a retry delay."""
    max_deadline_s: float = Field(3600.0, gt=0)
    """Deadline in seconds of requests that set none or a longer one."""
    no_worker_timeout_s: float = Field(30.0, gt=0)
    """Maximum seconds that requests wait while there is no worker."""
    long_wait_s: float = Field(60.0, gt=0)
    """Maximum seconds that a request too long for one instance waits until a group that can hold it is formed."""
    client_stall_timeout_s: float = Field(60.0, gt=0)
    """Seconds after which a client that does not read is disconnected."""

    # Routing.
    queue_order: Literal["first-come", "shortest-first", "deadline"] = "first-come"
    """Order of waiting requests within a class. first-come: by arrival; shortest-first: the fewest tokens to compute
    first, which shortens most waits but lengthens those of long prompts; deadline: the earliest deadline first."""
    prefix_marks: int = Field(1 << 17, ge=0, le=1 << 24)
    """Maximum prompt prefixes, in pieces of 256 tokens, for which the dispatcher remembers the workers that cache them,
    so that similar prompts are routed there; 0: none."""
    growth_tokens: int = Field(64, ge=0)
    """Assumed growth of an answer in tokens before any answers are known; later it is learned for each class of
    requests.
    """
    replay_limit: int = Field(3, ge=0)
    """Maximum times that a request is replayed after the loss of its worker."""
    resume: bool = True
    """Let clients resume requests here whose dispatcher has died, and let other dispatchers resume those of this
    one.
    """

    # Logs, metrics and traces.
    access_log: bool = True
    """Log one line for each request, without any text of its prompt or answer."""
    request_history_count: int = Field(4096, ge=0, le=1 << 20)
    """Number of ended requests that `ballast why` can explain."""
    otlp_traces_endpoint: str | None = Field(None, pattern=r"^https?://")
    """Collector for traces of requests: http://HOST:4318, OTLP over HTTP. Default: no traces."""

    shutdown_timeout_s: float = Field(30.0, ge=0)
    """Maximum seconds for running requests to finish when the dispatcher is stopped."""
