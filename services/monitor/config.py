"""Settings of the monitor."""

import secrets
from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from ballast.service.security import ServiceSettings
from ballast.service.settings import Section


class PressureSettings(Section):
    """When memory counts as short, and when as plentiful again. Fractions are of KV memory, over the whole cluster."""

    horizon_s: float = Field(default=1.0, gt=0)
    """Demand is forecast so many seconds ahead."""
    trend_window_s: float = Field(default=2.0, gt=0)
    """Seconds of the past that the forecast is made of."""
    overload_threshold_fraction: float = Field(default=0.95, gt=0)
    """Forecast demand above this share of the capacity is an overload. Below 1, because workers keep a reserve for the
    growth of what runs: the last request waits before demand is all there is."""
    overload_arming_fraction: float = Field(default=0.9, gt=0)
    """An overload counts only where so large a share of the workers' memory is in use already: an early drop wins
    nothing, and a pipeline is slower."""
    overload_lead_s: float = Field(default=0.0, ge=0)
    """Growth of so many seconds is expected once more: the time a drop takes, where bursts are quick."""
    overload_after_s: float = Field(default=0.15, ge=0)
    """Seconds for which an overload has to last: by chance a small cluster looks short for a moment."""
    overload_urgent_fraction: float = Field(default=1.25, gt=0)
    """Forecast demand above this share of the capacity does not wait for that."""
    overload_margin_fraction: float = Field(default=0.25, ge=0)
    """Memory freed in excess, as a share of the forecast demand. Where only some groups are merged, new requests all go
    where the room is, and wait for computing there."""
    relief_threshold_fraction: float = Field(default=0.8, gt=0)
    """Layers come back while demand is below this share of the un-dropped memory."""
    relief_after_s: float = Field(default=2.0, ge=0)
    """Seconds for which demand has to be below that."""
    dwell_s: float = Field(default=3.0, ge=0)
    """Least seconds between two transitions."""
    scale_out_after_s: float = Field(default=5.0, ge=0)
    """Seconds of overload, in spite of all drops, after which more instances are advised."""
    scale_in_threshold_fraction: float = Field(default=0.2, gt=0)
    """Fewer instances are advised while demand is below this share of the un-dropped memory."""
    scale_in_after_s: float = Field(default=300.0, ge=0)
    """Seconds for which demand has to be below that."""
    scale_dwell_s: float = Field(default=60.0, ge=0)
    """Least seconds between two pieces of advice."""

    @model_validator(mode="after")
    def _thresholds_are_in_order(self) -> Self:
        if not self.relief_threshold_fraction < self.overload_arming_fraction <= self.overload_threshold_fraction:
            raise ValueError(
                "must satisfy relief_threshold_fraction < overload_arming_fraction <= overload_threshold_fraction,"
                " else a drop and its restore would chase each other"
            )
        return self


class MonitorSettings(ServiceSettings):
    service: ClassVar[str] = "monitor"
    summary: ClassVar[str] = "Says which instances are there and how loaded they are."
    short_flags: ClassVar[Mapping[str, str]] = {"pressure.dwell-s": "dwell-s", "shutdown-timeout-s": "shutdown-timeout"}

    port: int = Field(default=50052, ge=0, le=65535)
    """Port to listen on; 0: any free one."""
    monitor_id: str = Field(default_factory=lambda: f"monitor-{secrets.token_hex(4)}", min_length=1)
    """Name of this replica. Default: made up at every start."""
    lease_s: float = Field(default=3.0, gt=0)
    """Seconds after which a silent instance counts as lost."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds of one engine step after which an instance counts as lost until the step ends."""
    warmup_s: float = Field(default=4.0, gt=0)
    """Seconds that a new active monitor waits before it says who is missing."""
    leadership_ttl_s: float = Field(default=3.0, ge=0.3)
    """Seconds after which a silent active replica loses its role to a standby."""
    tick_interval_s: float = Field(default=0.1, gt=0)
    """Seconds between two decisions."""
    registry_interval_s: float = Field(default=1.0, gt=0)
    """Seconds between two looks at the registry of instances."""
    max_instances: int = Field(default=1000, gt=0)
    """Instances that are watched; more are ignored."""
    max_watchers: int = Field(default=64, gt=0)
    """Streams of events that may be open at once."""
    watcher_queue_length: int = Field(default=4096, gt=0)
    """Events that a watcher may be behind before it is sent away."""
    history_length: int = Field(default=300, gt=0)
    """Load samples kept of each instance."""
    backlog_lease_s: float = Field(default=1.0, gt=0)
    """Seconds after which a silent dispatcher's backlog no longer counts."""
    pressure: PressureSettings = PressureSettings()
    """When memory counts as short, and when as plentiful again."""
    shutdown_timeout_s: float = Field(default=5.0, ge=0)
    """Seconds that open calls get to end."""
