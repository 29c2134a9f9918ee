"""Settings of the monitor. Numbers that need no tuning are constants where they are used."""

import secrets
from typing import ClassVar, Self

from pydantic import Field, model_validator

from ballast.service.security import ServiceSettings

_APART_FRACTION = 0.1  # minimum distance of the two thresholds, so that drops and restores do not oscillate


class MonitorSettings(ServiceSettings):
    service: ClassVar[str] = "monitor"
    summary: ClassVar[str] = "Tracks which instances are alive, and their load."
    developer: ClassVar[frozenset[str]] = frozenset(
        {"relief_threshold_fraction", "leadership_ttl_s", "shutdown_timeout_s"}
    )

    port: int = Field(default=50052, ge=0, le=65535)
    """Port to listen on; 0: any free one."""
    monitor_id: str = Field(default_factory=lambda: f"monitor-{secrets.token_hex(4)}", min_length=1)
    """Name of this replica. Default: generated at every start."""
    leadership_ttl_s: float = Field(default=3.0, ge=0.3)
    """Seconds after which a silent active replica loses its role to a standby."""
    shutdown_timeout_s: float = Field(default=5.0, ge=0)
    """Grace period in seconds for open calls at shutdown."""
    lease_s: float = Field(default=3.0, gt=0)
    """Seconds after which a silent instance counts as lost. Increase it if machines or networks pause, because all
    requests of a lost instance are replayed.
    """
    step_timeout_s: float = Field(default=60.0, gt=0)
    """Duration of an engine step, in seconds, after which its instance counts as lost until the step ends. It must
    exceed the longest step: compilation may take a minute.
    """
    overload_threshold_fraction: float = Field(default=0.95, gt=0)
    """The planner considers a change when the forecast KV demand exceeds this fraction of the KV capacity."""
    relief_threshold_fraction: float = Field(default=0.8, gt=0)
    """Dropped layers are restored while demand is below this fraction of the KV capacity with all layers. The rest is
    headroom for the next burst."""
    dwell_s: float = Field(default=3.0, ge=0)
    """Minimum seconds between two transitions. Increase it if drops and restores alternate because bursts follow each
    other quickly."""

    @model_validator(mode="after")
    def _thresholds_are_in_order(self) -> Self:
        if self.relief_threshold_fraction + _APART_FRACTION > self.overload_threshold_fraction:
            raise ValueError(
                f"relief_threshold_fraction must be at least {_APART_FRACTION} below overload_threshold_fraction, else"
                " drops and restores would oscillate"
            )
        return self
