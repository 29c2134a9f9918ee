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
    """Name of this replica. Default: made up at every start."""
    monitor_address: str | None = None
    """HOST:PORT of the monitor. Default: looked up in the state server."""
    leadership_ttl_s: float = Field(default=3.0, ge=0.3)
    """Seconds after which a silent active replica loses its role to a standby."""
    otlp_traces_endpoint: str | None = Field(default=None, pattern=r"^https?://")
    """Collector for spans of drops and restores: http://HOST:4318, OTLP over HTTP. Default: none."""
    shutdown_timeout_s: float = Field(default=5.0, ge=0)
    """Seconds that open calls get to end."""
    overload_policy: OverloadPolicy = OverloadPolicy.DROP
    """What to do when KV memory runs short: drop parameters where that is predicted to pay, leave it to the workers
    (recompute, swap), move requests between them (migrate), or drop from the start (static-pipeline)."""
    pipeline_degree: int = Field(default=2, ge=2, le=64)
    """Instances of one pipeline, with static-pipeline: the fewest that the parameters leave enough memory in."""
    ttft_target_s: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """With drop: seconds within which a first token is soon enough; nothing is dropped to make it sooner. A long prompt
    may take what it takes."""
    restore: bool = True
    """With drop: whether parameters come back when demand has fallen; off is for comparisons."""
    park: bool = False
    """Whether instances that nobody needs for a while are parked, and woken before they are missed."""
    least_instances: int = Field(default=1, ge=1)
    """With park: so many serve, however little there is to do."""
    park_dwell_s: float = Field(default=10.0, ge=0)
    """With park: seconds for which one instance less has to be enough before one leaves; at least twice what waking
    takes."""
    park_order: Literal["emptiest", "last-name"] = "emptiest"
    """With park: who leaves first. last-name where a platform ends instances in the order of their names."""
    scale_webhook: str | None = Field(default=None, pattern=r"^(https?://.*)?$")
    """URL that is told how many instances should serve, whenever that changes, at most every 15 s (docs/parking.md).
    Default: none."""
    scale_webhook_secret_file: Path | None = None
    """File with the secret by which these messages are signed: at least 16 bytes."""
    migrate_below_tokens: float = Field(default=32.0, ge=0)
    """With migrate: a worker with room for fewer tokens per running request gives requests away. About what an answer
    makes until the next look."""
    migrate_above_tokens: float = Field(default=96.0, ge=0)
    """With migrate: a worker with room for more tokens per running request takes them. Well above the other, else
    requests go to and fro."""
    restore_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that missing parameters may take to come back. Longer where they are many and the network is slow."""
