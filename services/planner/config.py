"""Settings of the planner. Numbers that need no tuning are constants where they are used."""

import secrets
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from ballast.common.overload import OverloadPolicy
from ballast.service.security import ServiceSettings


class PlannerSettings(ServiceSettings):
    service: ClassVar[str] = "planner"
    summary: ClassVar[str] = "Decides which instances serve together."
    developer: ClassVar[frozenset[str]] = frozenset(
        {
            "migrate_below_tokens",
            "migrate_above_tokens",
            "restore_timeout_s",
            "leadership_ttl_s",
            "shutdown_timeout_s",
        }
    )

    port: int = Field(default=50053, ge=0, le=65535)
    """Port to listen on; 0: any free one."""
    planner_id: str = Field(default_factory=lambda: f"planner-{secrets.token_hex(4)}", min_length=1)
    """Name of this replica. Default: generated at every start."""
    monitor_address: str | None = None
    """HOST:PORT of the monitor. Default: looked up in the state server."""
    leadership_ttl_s: float = Field(default=3.0, ge=0.3)
    """Seconds after which a silent active replica loses its role to a standby."""
    otlp_traces_endpoint: str | None = Field(default=None, pattern=r"^https?://")
    """Collector for spans of drops and restores: http://HOST:4318, OTLP over HTTP. Default: none."""
    shutdown_timeout_s: float = Field(default=5.0, ge=0)
    """Grace period in seconds for open calls at shutdown."""
    overload_policy: OverloadPolicy = OverloadPolicy.DROP
    """Policy when KV memory runs short: drop parameters if that is predicted to pay off (drop), preempt in the workers
    (recompute, swap), migrate requests between workers (migrate), or drop from the start (static-pipeline)."""
    pipeline_degree: int = Field(default=2, ge=2, le=64)
    """With static-pipeline: instances per pipeline. Choose the smallest number that leaves enough memory for KV."""
    ttft_target_s: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """With drop: TTFT target in seconds; nothing is dropped to reduce TTFT below it. The prefill time of a long prompt
    is allowed in any case."""
    restore: bool = True
    """With drop: whether parameters are restored when demand has fallen; off is for comparisons."""
    park: bool = False
    """Whether idle instances are parked automatically, and woken before they are needed."""
    least_instances: int = Field(default=1, ge=1)
    """With park: minimum number of serving instances, even without demand."""
    park_dwell_s: float = Field(default=10.0, ge=0)
    """With park: seconds for which the demand must fit on one fewer instance before an instance is parked; at least
    twice the wake time.
    """
    park_order: Literal["emptiest", "last-name"] = "emptiest"
    """With park: which instance is parked first. Use last-name if the platform scales down in order of names, as a
    Kubernetes StatefulSet does.
    """
    scale_webhook: str | None = Field(default=None, pattern=r"^(https?://.*)?$")
    """URL to which the number of instances that should serve is posted when it changes, at most every 15 s
    (docs/parking.md). Default: none."""
    scale_webhook_secret_file: Path | None = None
    """File with the secret that signs these messages, at least 16 bytes."""
    migrate_below_tokens: float = Field(default=32.0, ge=0)
    """With migrate: a worker with room for fewer tokens per running request than this migrates requests away. About the
    number of tokens by which an answer grows between two checks.
    """
    migrate_above_tokens: float = Field(default=96.0, ge=0)
    """With migrate: a worker with room for more tokens per running request than this receives them. Must be well above
    migrate_below_tokens, or requests oscillate."""
    restore_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds within which missing parameters must be loaded. Increase it for large models on slow networks."""
