"""Settings of the monitor. Numbers that need no tuning are constants where they are used."""

import secrets
from typing import ClassVar, Self

from pydantic import Field, model_validator

from ballast.service.security import ServiceSettings

_APART_FRACTION = 0.1  # minimum distance of the two thresholds, against oscillation of drop and restore


class MonitorSettings(ServiceSettings):
    service: ClassVar[str] = "monitor"
    summary: ClassVar[str] = "Says which instances are there and how loaded they are."
    developer: ClassVar[frozenset[str]] = frozenset(
        {"relief_threshold_fraction", "leadership_ttl_s", "shutdown_timeout_s"}
    )

    port: int = Field(default=50052, ge=0, le=65535)
    """Port to listen on; 0: any free one."""
    monitor_id: str = Field(default_factory=lambda: f"monitor-{secrets.token_hex(4)}", min_length=1)
    """Name of this replica. Default: made up at every start."""
    leadership_ttl_s: float = Field(default=3.0, ge=0.3)
    """Seconds after which a silent active replica loses its role to a standby."""
    shutdown_timeout_s: float = Field(default=5.0, ge=0)
    """Seconds that open calls get to end."""
    lease_s: float = Field(default=3.0, gt=0)
    """Seconds after which a silent instance counts as lost. Longer where machines or networks stop for a while: to take
    an instance for lost costs all that runs on it."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds of one engine step after which an instance counts as lost until the step ends. It depends on the engine:
    an instance that compiles may be silent for a minute."""
    overload_threshold_fraction: float = Field(default=0.95, gt=0)
    """The planner looks for something better once the forecast demand for KV is above this share of what there is: with
    a lower one it looks earlier."""
    relief_threshold_fraction: float = Field(default=0.8, gt=0)
    """Dropped layers come back while demand is below this share of the KV memory that there is with all layers: the
    rest is for the next burst."""
    dwell_s: float = Field(default=3.0, ge=0)
    """Least seconds between two transitions. Longer where bursts follow each other so quickly that drops and restores
    do."""

    @model_validator(mode="after")
    def _thresholds_are_in_order(self) -> Self:
        if self.relief_threshold_fraction + _APART_FRACTION > self.overload_threshold_fraction:
            raise ValueError(
                f"relief_threshold_fraction must be at least {_APART_FRACTION} below overload_threshold_fraction, else"
                " a drop and its restore would chase each other"
            )
        return self
