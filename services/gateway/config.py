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
    """Name of this replica. Default: generated at every start."""
    dispatchers: str = "127.0.0.1:50051"
    """Addresses of dispatchers, HOST:PORT, separated by commas."""
    served_model_name: str | None = None
    """Names of the model for clients, separated by commas; answers use the first. Default: the model's own name."""
    tool_call_parser: Literal[
        "auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "openai", "glm45", "pythonic"
    ] = "auto"
    """Format in which the model writes tool calls: hermes (Hermes, Qwen 2.5 and 3), qwen3_coder, llama3_json, mistral,
    deepseek_v3 (and V3.1), openai (GPT-OSS), glm45 or pythonic (Llama 4). auto: detected from its chat template."""
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1", "mistral"] = "auto"
    """Format in which the model writes its reasoning, which answers return as reasoning_content: qwen3 (<think> and
    </think>), deepseek_r1 (the prompt already contains <think>), mistral ([THINK]). auto: detected from its chat
    template. none: reasoning is text."""

    jobs: str | None = Field(None, pattern=r"^https?://")
    """Address of the jobs service, http://HOST:PORT, for /v1/files and /v1/batches. Default: none, so these paths are
    refused.
    """
    dashboard: bool = False
    """Serve a page at /dashboard that shows the cluster live to everyone who can reach this gateway. Its drop and
    restore buttons need a token with the role operate; they are missing if dispatchers have no tokens."""

    allowed_origins: str = ""
    """Origins whose pages may read answers in a browser: https://HOST, separated by commas; * for all. Default:
    none.
    """

    # Limits.
    max_concurrent_requests: int = Field(4096, ge=1)
    """Maximum concurrent requests. Others are refused with status 503."""
    max_body_bytes: int = Field(8 << 20, ge=1024, le=64 << 20)
    """Maximum size of a request's body after decompression. Above 9 MiB, dispatchers need a higher
    --max-message-bytes.
    """
    max_choices: int = Field(128, ge=1, le=4096)
    """Maximum choices of one request: prompts times n."""
    body_timeout_s: float = Field(30.0, gt=0)
    """Maximum seconds from the head of a request to the end of its body."""
    client_stall_timeout_s: float = Field(60.0, gt=0)
    """Seconds after which a client that does not read is disconnected."""

    # Calls to dispatchers, traces, shutdown.
    resume_s: float = Field(30.0, ge=0)
    """Maximum seconds to find another dispatcher that resumes a request whose dispatcher has died; 0: the request
    fails.
    """

    otlp_traces_endpoint: str | None = Field(None, pattern=r"^https?://")
    """Collector for spans of requests: http://HOST:4318, OTLP over HTTP. Default: none."""

    shutdown_timeout_s: float = Field(30.0, ge=0)
    """Maximum seconds for running requests to finish after the signal to stop."""
