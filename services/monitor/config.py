"""Settings of the monitor and its flags."""

import argparse
import secrets
from typing import ClassVar, Self

from pydantic import Field, model_validator

from ballast.service.logs import LogFormat
from ballast.service.settings import Section, Settings


class PressureSettings(Section):
    """When memory counts as short, and when as plentiful again. Fractions are of KV memory, over the whole cluster."""

    horizon_s: float = Field(default=1.0, gt=0)  # demand is forecast so far ahead
    trend_window_s: float = Field(default=2.0, gt=0)  # from what the last seconds have shown
    # Forecast demand above this share of the capacity is an overload: what workers keep for the growth of what runs
    # (worker.admission_reserve_fraction) lets nobody in, so whoever is last waits before demand is all there is ...
    overload_threshold_fraction: float = Field(default=0.95, gt=0)
    # ... if the workers' memory is taken to this share already: early drops win nothing, and a pipeline is slower.
    overload_arming_fraction: float = Field(default=0.9, gt=0)
    # What grew in so many seconds will grow as much again in the next: the time a drop takes, where bursts are quick.
    overload_lead_s: float = Field(default=0.0, ge=0)
    # Chance makes small clusters look short for a moment: that has to last, unless a great deal is missing.
    overload_after_s: float = Field(default=0.15, ge=0)
    overload_urgent_fraction: float = Field(default=1.25, gt=0)
    # Of the forecast demand: freed in excess. Where only some groups are merged, all who come go where the room is,
    # and wait for computing there.
    overload_margin_fraction: float = Field(default=0.25, ge=0)
    relief_threshold_fraction: float = Field(default=0.8, gt=0)  # of the un-dropped memory: layers begin to come back
    relief_after_s: float = Field(default=2.0, ge=0)  # usage has to be below it for so long
    dwell_s: float = Field(default=3.0, ge=0)  # between any two transitions
    scale_out_after_s: float = Field(default=5.0, ge=0)  # an overload has lasted so long in spite of everything
    scale_in_threshold_fraction: float = Field(default=0.2, gt=0)  # of the un-dropped memory
    scale_in_after_s: float = Field(default=300.0, ge=0)
    scale_dwell_s: float = Field(default=60.0, ge=0)  # between any two pieces of advice

    @model_validator(mode="after")
    def _thresholds_are_in_order(self) -> Self:
        if not self.relief_threshold_fraction < self.overload_arming_fraction <= self.overload_threshold_fraction:
            raise ValueError(
                "must satisfy relief_threshold_fraction < overload_arming_fraction <= overload_threshold_fraction,"
                " else a drop and its restore would chase each other"
            )
        return self


class MonitorSettings(Settings):
    service: ClassVar[str] = "monitor"

    host: str = "127.0.0.1"
    port: int = Field(default=50052, ge=0, le=65535)
    advertise_host: str | None = None
    metrics_port: int = Field(default=0, ge=0, le=65535)
    redis_url: str = "redis://127.0.0.1:6379"
    # Unique unless given, so that replicas can be told apart.
    monitor_id: str = Field(default_factory=lambda: f"monitor-{secrets.token_hex(4)}", min_length=1)
    lease_s: float = Field(default=3.0, gt=0)  # an instance that is silent for longer is lost
    warmup_s: float = Field(default=4.0, gt=0)  # a new active monitor waits so long before it says who is missing
    leadership_ttl_s: float = Field(default=3.0, ge=0.3)
    tick_interval_s: float = Field(default=0.1, gt=0)
    registry_interval_s: float = Field(default=1.0, gt=0)
    max_instances: int = Field(default=1000, gt=0)
    max_watchers: int = Field(default=64, gt=0)
    watcher_queue_length: int = Field(default=4096, gt=0)  # events a watcher may be behind before it is sent away
    history_length: int = Field(default=300, gt=0)  # load samples kept per instance
    backlog_lease_s: float = Field(default=1.0, gt=0)  # a dispatcher that says nothing for longer is not there
    pressure: PressureSettings = PressureSettings()
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")
    log_format: LogFormat = "console"
    shutdown_timeout_s: float = Field(default=5.0, ge=0)


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m services.monitor", description="Says which instances are there and how loaded they are."
    )
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (50052); 0: any free one")
    parser.add_argument("--advertise-host", dest="advertise_host", help="name under which others reach this process")
    parser.add_argument("--metrics-port", dest="metrics_port", type=int, help="Prometheus metrics; 0: none")
    parser.add_argument("--redis-url", dest="redis_url", help="state server (redis://127.0.0.1:6379)")
    parser.add_argument("--monitor-id", dest="monitor_id", help="tells replicas apart (minted at every start)")
    parser.add_argument("--lease-s", dest="lease_s", type=float, help="an instance silent for longer is lost (3)")
    parser.add_argument("--warmup-s", dest="warmup_s", type=float, help="patience of a new active monitor (4)")
    parser.add_argument("--leadership-ttl-s", dest="leadership_ttl_s", type=float, help="lease of the active one (3)")
    parser.add_argument(
        "--dwell-s", dest="pressure.dwell_s", type=float, help="least time between two drops or restores (3)"
    )
    parser.add_argument("--log-level", dest="log_level", help="debug, info, warning or error")
    parser.add_argument("--log-format", dest="log_format", help="console or json")
    parser.add_argument("--shutdown-timeout", dest="shutdown_timeout_s", type=float, help="seconds for calls to end")
    return parser
