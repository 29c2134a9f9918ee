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
    """Name of this replica. Default: made up at every start."""
    tokens_file: Path | None = None
    """File with the hashes of the tokens that clients need, as `ballast tokens` makes it; read again when it changes.
    Default: anybody who reaches the port may do everything."""
    model: Path
    """Folder with tokenizer.json and the chat template, or org/name[@revision] of a hub; weights are not read."""
    chat_template: Path | None = None
    """File of a chat template. Default: the model's own."""
    generation_config: str = Field("auto", min_length=1)
    """Sampling parameters for HTTP requests that give none: auto, those of the model's generation_config.json; ballast:
    none, so temperature 1 and no bound; or a folder with another generation_config.json."""

    # Admission.
    max_num_queued_reqs: int = Field(2048, ge=1, le=1 << 20)
    """Requests that may wait; more are refused with the delay after which to try again."""
    max_num_queued_tokens: int = Field(4 << 20, ge=1)
    """Prompt tokens that may wait; more are refused likewise."""
    max_offline_queued: int = Field(256, ge=1, le=1 << 20)
    """Offline requests (class batch) that may wait besides; more are refused likewise. Workers ask for them when they
    have something to spare."""
    max_calls_per_connection: int = Field(16_384, ge=1, le=1 << 20)
    """Calls that one connection may have under way; more are refused with the delay after which to try again."""
    max_calls_per_token: int = Field(0, ge=0, le=1 << 20)
    """Calls that clients with one token may have under way here, over all their connections; 0: no bound."""
    max_connections: int = Field(0, ge=0, le=1 << 20)
    """Connections that may be open; more are closed as they come. 0: as many as the process may open files, less
    those it needs itself."""
    max_message_bytes: int = Field(9 << 20, ge=1 << 16, le=16 << 20)
    """Bytes of one request, a prompt with all that belongs to it; a larger one is refused. A million token ids take
    3 MiB. The longest body that gateways take by default passes."""
    max_request_bytes: int = Field(1 << 30, ge=16 << 20)
    """Bytes of requests over 64 KiB that may be under way, all together; more are refused likewise."""
    max_deadline_s: float = Field(3600.0, gt=0)
    """Deadline in seconds of a request that brings none or a longer one."""
    no_worker_timeout_s: float = Field(30.0, gt=0)
    """Seconds a request waits while there is no worker at all."""
    long_wait_s: float = Field(60.0, gt=0)
    """Seconds that a request longer than an instance holds waits until a group of instances is formed that does."""
    client_stall_timeout_s: float = Field(60.0, gt=0)
    """Seconds after which a client that reads nothing is given up."""

    # Routing.
    queue_order: Literal["first-come", "shortest-first", "deadline"] = "first-come"
    """Which request of a class goes first when several wait. Shortest first: the fewest tokens to compute, so that most
    wait less where computing is short, and long prompts the longest. Deadline: the earliest."""
    prefix_marks: int = Field(1 << 17, ge=0, le=1 << 24)
    """Beginnings of prompts, in pieces of 256 tokens, of which it remembers where their KV is, to send others like them
    there; 0: none."""
    growth_tokens: int = Field(64, ge=0)
    """Tokens of an answer before any is known: what it is going to grow by is learnt, for each class of requests."""
    replay_limit: int = Field(3, ge=0)
    """How often a request is started anew after its worker was lost."""
    resume: bool = True
    """Let clients go on here with requests whose dispatcher has died, and elsewhere with those of this one."""

    # Logs, metrics and traces.
    access_log: bool = True
    """One line in the log for each request, without a word of its prompt or answer."""
    request_history_count: int = Field(4096, ge=0, le=1 << 20)
    """Ended requests that `ballast why` can tell of."""
    otlp_traces_endpoint: str | None = Field(None, pattern=r"^https?://")
    """Collector for traces of requests: http://HOST:4318, OTLP over HTTP. Default: no traces."""

    shutdown_timeout_s: float = Field(30.0, ge=0)
    """Seconds that running requests get to finish when the dispatcher is stopped."""
