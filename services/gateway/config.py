"""Settings of a gateway. Flag names follow vLLM where it has the same setting."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from ballast.service.security import GuardedSettings


class GatewaySettings(GuardedSettings):
    service: ClassVar[str] = "gateway"
    summary: ClassVar[str] = "Serves OpenAI's and Anthropic's HTTP interfaces on top of dispatchers."
    developer: ClassVar[frozenset[str]] = frozenset(
        {"max_choices", "body_timeout_s", "client_stall_timeout_s", "resume_s"}
    )
    short_flags: ClassVar[Mapping[str, str]] = {"shutdown-timeout-s": "shutdown-timeout"}

    # Addresses, names and formats.
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0: any free one."""
    gateway_id: str | None = Field(None, min_length=1, max_length=128)
    """Name of this replica. Default: made up at every start."""
    dispatchers: str = "127.0.0.1:50051"
    """Where requests go: HOST:PORT, several with commas."""
    served_model_name: str | None = None
    """What clients call the model; several names with commas, answers use the first. Default: its own name."""
    tool_call_parser: Literal[
        "auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "openai", "glm45", "pythonic"
    ] = "auto"
    """How the model writes calls of tools: hermes (Hermes, Qwen 2.5 and 3), qwen3_coder, llama3_json, mistral,
    deepseek_v3 (and V3.1), openai (GPT-OSS), glm45 or pythonic (Llama 4). auto: by its chat template."""
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1", "mistral"] = "auto"
    """How the model writes its thoughts, which answers have as reasoning_content: qwen3 (<think> and </think>),
    deepseek_r1 (the prompt has begun one), mistral ([THINK]). auto: by its chat template. none: thoughts are text."""

    jobs: str | None = Field(None, pattern=r"^https?://")
    """Where /v1/files and /v1/batches go: http://HOST:PORT of the jobs service. Default: there are none."""
    dashboard: bool = False
    """Serve a page at /dashboard that shows the cluster live, to whoever can reach this gateway. Its drops and restores
    need a token with the role operate; without tokens at the dispatchers it has none."""

    allowed_origins: str = ""
    """Origins whose pages a browser lets read answers: https://HOST, several with commas; * for all. Default: none."""

    # Limits.
    max_concurrent_requests: int = Field(4096, ge=1)
    """Requests that are served at once; more are refused with status 503."""
    max_body_bytes: int = Field(8 << 20, ge=1024, le=64 << 20)
    """Longest body of a request, unpacked; beyond 9 MiB dispatchers need a higher --max-message-bytes."""
    max_choices: int = Field(128, ge=1, le=4096)
    """Most choices that one request may ask for: prompts times n."""
    body_timeout_s: float = Field(30.0, gt=0)
    """Seconds from the head of a request to the end of its body."""
    client_stall_timeout_s: float = Field(60.0, gt=0)
    """Seconds after which a client that reads nothing is given up."""

    # Calls to dispatchers, traces, shutdown.
    resume_s: float = Field(30.0, ge=0)
    """Seconds to find another dispatcher that goes on with a request whose own has died; 0: it fails."""

    otlp_traces_endpoint: str | None = Field(None, pattern=r"^https?://")
    """Collector for spans of requests: http://HOST:4318, OTLP over HTTP. Default: none."""

    shutdown_timeout_s: float = Field(30.0, ge=0)
    """Seconds that running requests get to finish after the signal to stop."""
