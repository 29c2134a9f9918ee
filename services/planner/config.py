"""Settings of the planner."""

import secrets
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from ballast.common.overload import OverloadPolicy
from ballast.service.security import ServiceSettings


class PlannerSettings(ServiceSettings):
    service: ClassVar[str] = "planner"
    summary: ClassVar[str] = "Decides which instances serve together."
    short_flags: ClassVar[Mapping[str, str]] = {"shutdown-timeout-s": "shutdown-timeout"}

    port: int = Field(default=50053, ge=0, le=65535)
    """Port to listen on; 0: any free one."""
    planner_id: str = Field(default_factory=lambda: f"planner-{secrets.token_hex(4)}", min_length=1)
    """Name of this replica. Default: made up at every start."""
    monitor_address: str | None = None
    """HOST:PORT of the monitor. Default: looked up in the state server."""
    leadership_ttl_s: float = Field(default=3.0, ge=0.3)
    """Seconds after which a silent active replica loses its role to a standby."""
    coalesce_s: float = Field(default=0.1, ge=0)
    """Instances that join within so many seconds share an epoch."""
    verify_interval_s: float = Field(default=1.0, gt=0)
    """Seconds between two looks at the stored layout."""
    retry_s: float = Field(default=0.5, gt=0)
    """Seconds after which the state server is asked again when it gave no answer."""
    drain_timeout_s: float = Field(default=10.0, gt=0)
    """Longest wait in seconds for the epoch that takes a drained worker out."""
    max_drains: int = Field(default=1000, gt=0)
    """Drains whose answers are remembered."""
    max_watchers: int = Field(default=64, gt=0)
    """Streams of layouts that may be open at once."""
    otlp_traces_endpoint: str | None = Field(default=None, pattern=r"^https?://")
    """Collector for spans of drops and restores: http://HOST:4318, OTLP over HTTP. Default: none."""
    overload_policy: OverloadPolicy = OverloadPolicy.DROP
    """What to do when KV memory runs short: drop parameters, leave it to the workers (recompute, swap), move requests
    between them (migrate), or have parameters dropped from the start (static-pipeline)."""
    pipeline_degree: int = Field(default=2, ge=2, le=64)
    """Instances of one pipeline, with static-pipeline."""
    restore: bool = True
    """With drop: whether parameters come back when demand has fallen; off is for comparisons."""
    compare: bool = True
    """With drop: whether an overload leads to what is predicted to be the best, which may be to drop nothing. Off, and
    where workers do not know yet what steps take, so much is dropped as is lacking."""
    tolerable_shortfall_fraction: float = Field(default=0.65, ge=0)
    """With drop: groups become deeper than pairs only where pairs leave more than this share of the wanted KV unmet.
    The need that the monitor tells has its margin: 0.65 is a demand of 1.25 times what there is."""
    migrate_below_tokens: float = Field(default=32.0, ge=0)
    """With migrate: a worker with room for fewer tokens per running request gives requests away."""
    migrate_above_tokens: float = Field(default=96.0, ge=0)
    """With migrate: a worker with room for more tokens per running request takes them."""
    prepare_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds that a drop may be prepared; nothing has changed for anybody until then."""
    restore_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that missing parameters may take to come back."""
    shutdown_timeout_s: float = Field(default=5.0, ge=0)
    """Seconds that open calls get to end."""
