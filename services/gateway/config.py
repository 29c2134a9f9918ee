"""Settings of a gateway. Flag names follow vLLM's if it has the same setting."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from ballast.service.security import GuardedSettings


class GatewaySettings(GuardedSettings):
    service: ClassVar[str] = "gateway"
    summary: ClassVar[str] = "Serves the OpenAI- and Anthropic-compatible HTTP APIs on top of dispatchers."
    developer: ClassVar[frozenset[str]] = frozenset(
        {"max_choices", "body_timeout_s", "client_stall_timeout_s", "resume_s"}
    )
    short_flags: ClassVar[Mapping[str, str]] = {"shutdown-timeout-s": "shutdown-timeout"}

    # Addresses, names and formats.
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0: any free one."""
    gateway_id: str | None = Field(None, min_length=1, max_length=128)
    """Name of this replica. Default: generated at every start."""
    dispatchers: str = "127.0.0.1:50051"
    """Addresses of the dispatchers: HOST:PORT, comma-separated."""
    served_model_name: str | None = None
    """Names of the model in the API, comma-separated; answers use the first. Default: the model's own name."""
    tool_call_parser: Literal[
        "auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "openai", "glm45", "pythonic"
    ] = "auto"
    """Format of the model's tool calls: hermes (Hermes, Qwen 2.5 and 3), qwen3_coder, llama3_json, mistral,
    deepseek_v3 (and V3.1), openai (GPT-OSS), glm45 or pythonic (Llama 4). auto: derived from its chat template."""
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1", "mistral"] = "auto"
    """Format of the model's reasoning, which is returned as reasoning_content: qwen3 (<think> and </think>),
    deepseek_r1 (opened by the prompt), mistral ([THINK]). auto: derived from its chat template. none: reasoning is
    returned as text."""

    jobs: str | None = Field(None, pattern=r"^https?://")
    """URL of the jobs service, which serves /v1/files and /v1/batches: http://HOST:PORT. Default: none."""
    dashboard: bool = False
    """Serve a live dashboard of the cluster at /dashboard, without authentication. Its drop and restore need a token
    with the role operate, and are disabled if the dispatchers require no tokens."""

    allowed_origins: str = ""
    """Origins whose pages may call the API from a browser (CORS): https://HOST, comma-separated; * for all. Default:
    none."""

    # Limits.
    max_concurrent_requests: int = Field(4096, ge=1)
    """Maximum number of concurrent requests; more are refused with status 503."""
    max_body_bytes: int = Field(8 << 20, ge=1024, le=64 << 20)
    """Maximum size of a request body, decompressed; beyond 9 MiB dispatchers need a higher --max-message-bytes."""
    max_choices: int = Field(128, ge=1, le=4096)
    """Maximum number of choices of one request: prompts times n."""
    body_timeout_s: float = Field(30.0, gt=0)
    """Seconds within which a request's body must have arrived after its head."""
    client_stall_timeout_s: float = Field(60.0, gt=0)
    """Seconds after which a client that reads nothing is disconnected."""

    # Calls to dispatchers, traces, shutdown.
    resume_s: float = Field(30.0, ge=0)
    """Seconds within which a request is resumed at another dispatcher if its own fails; 0: the request fails."""

    otlp_traces_endpoint: str | None = Field(None, pattern=r"^https?://")
    """Collector for spans of requests: http://HOST:4318, OTLP over HTTP. Default: none."""

    shutdown_timeout_s: float = Field(30.0, ge=0)
    """Grace period in seconds for running requests after the signal to stop."""
