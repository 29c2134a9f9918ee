"""Settings of a dispatcher. Flag names follow vLLM's if it has the same setting."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from ballast.service.security import ServiceSettings


class DispatcherSettings(ServiceSettings):
    service: ClassVar[str] = "dispatcher"
    summary: ClassVar[str] = "Accepts requests, keeps the backlog, chooses workers and relays tokens."
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
    """File with the hashes of the tokens that clients need, created by `ballast tokens`; reloaded when it changes.
    Default: no authentication; every client may do everything."""
    model: Path
    """Folder with tokenizer.json and the chat template, or org/name[@revision] on Hugging Face; weights are not
    read."""
    chat_template: Path | None = None
    """File with a chat template. Default: the model's own."""
    generation_config: str = Field("auto", min_length=1)
    """Default sampling parameters of HTTP requests. auto: from the model's generation_config.json; ballast: temperature
    1 and no limits; or a folder with another generation_config.json."""

    # Admission.
    max_num_queued_reqs: int = Field(2048, ge=1, le=1 << 20)
    """Maximum number of waiting requests; more are refused with a retry delay."""
    max_num_queued_tokens: int = Field(4 << 20, ge=1)
    """Maximum number of waiting prompt tokens; more are refused with a retry delay."""
    max_offline_queued: int = Field(256, ge=1, le=1 << 20)
    """Maximum number of waiting offline requests (class batch), which workers pull when they have spare capacity; more
    are refused with a retry delay."""
    max_calls_per_connection: int = Field(16_384, ge=1, le=1 << 20)
    """Maximum number of concurrent calls of one connection; more are refused with a retry delay."""
    max_calls_per_token: int = Field(0, ge=0, le=1 << 20)
    """Maximum number of concurrent calls of clients with the same token, over all connections; 0: unlimited."""
    max_connections: int = Field(0, ge=0, le=1 << 20)
    """Maximum number of open connections; more are closed immediately. 0: the process's limit on open files, less a
    reserve."""
    max_message_bytes: int = Field(9 << 20, ge=1 << 16, le=16 << 20)
    """Maximum size of one request, including its prompt; larger ones are refused. A million token ids take 3 MiB. The
    default admits the largest body that gateways accept by default."""
    max_request_bytes: int = Field(1 << 30, ge=16 << 20)
    """Maximum total size of concurrent requests over 64 KiB; more are refused with a retry delay."""
    max_deadline_s: float = Field(3600.0, gt=0)
    """Maximum and default deadline of requests, in seconds."""
    no_worker_timeout_s: float = Field(30.0, gt=0)
    """Seconds for which a request waits while there is no worker."""
    long_wait_s: float = Field(60.0, gt=0)
    """Seconds for which a request that exceeds every instance waits for a group that can hold it."""
    client_stall_timeout_s: float = Field(60.0, gt=0)
    """Seconds after which a client that reads nothing is disconnected."""

    # Routing.
    queue_order: Literal["first-come", "shortest-first", "deadline"] = "first-come"
    """Order of waiting requests within a class. shortest-first: fewest uncomputed tokens first, which shortens most
    waits if compute is the bottleneck, but delays long prompts. deadline: earliest deadline first."""
    prefix_marks: int = Field(1 << 17, ge=0, le=1 << 24)
    """Maximum number of tracked prompt prefixes (multiples of 256 tokens) with the workers that cache their KV, for
    prefix-aware routing; 0: none.
    """
    growth_tokens: int = Field(64, ge=0)
    """Assumed answer length in tokens until the mean of the priority class is known."""
    replay_limit: int = Field(3, ge=0)
    """Maximum number of replays of a request after the loss of its worker."""
    resume: bool = True
    """Whether clients may resume requests of a failed dispatcher on this one, and requests of this one on another."""

    # Logs, metrics and traces.
    access_log: bool = True
    """Log one line for each request, without its prompt or answer."""
    request_history_count: int = Field(4096, ge=0, le=1 << 20)
    """Number of ended requests that `ballast why` can show."""
    otlp_traces_endpoint: str | None = Field(None, pattern=r"^https?://")
    """Collector for traces of requests: http://HOST:4318, OTLP over HTTP. Default: no traces."""

    shutdown_timeout_s: float = Field(30.0, ge=0)
    """Grace period in seconds for running requests when the dispatcher is stopped."""
