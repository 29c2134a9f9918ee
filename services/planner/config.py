"""Settings of the planner and its flags."""

import argparse
import secrets
from typing import ClassVar

from pydantic import Field

from ballast.common.overload import OverloadPolicy
from ballast.service.logs import LogFormat
from ballast.service.settings import Settings


class PlannerSettings(Settings):
    service: ClassVar[str] = "planner"

    host: str = "127.0.0.1"
    port: int = Field(default=50053, ge=0, le=65535)
    advertise_host: str | None = None
    metrics_port: int = Field(default=0, ge=0, le=65535)
    redis_url: str = "redis://127.0.0.1:6379"
    # Unique unless given, so that replicas can be told apart.
    planner_id: str = Field(default_factory=lambda: f"planner-{secrets.token_hex(4)}", min_length=1)
    monitor_address: str | None = None  # host:port; default: whoever holds the monitor's lease
    leadership_ttl_s: float = Field(default=3.0, ge=0.3)
    coalesce_s: float = Field(default=0.1, ge=0)  # joins within this time share an epoch
    verify_interval_s: float = Field(default=1.0, gt=0)  # between two looks at the stored layout
    retry_s: float = Field(default=0.5, gt=0)  # after the state server gave no answer
    drain_timeout_s: float = Field(default=10.0, gt=0)  # longest wait for the epoch that takes a drained worker out
    max_drains: int = Field(default=1000, gt=0)  # drains whose answers are remembered
    max_watchers: int = Field(default=64, gt=0)
    overload_policy: OverloadPolicy = OverloadPolicy.DROP
    pipeline_degree: int = Field(default=2, ge=2, le=64)  # instances of one pipeline, with static-pipeline
    restore: bool = True  # with drop: parameters come back when demand has fallen. False is for comparisons
    # With drop: groups become deeper than pairs only where pairs leave more than this share of their KV unmet. The need
    # that the monitor tells has its margin: 0.65 is a demand of 1.25 times what there is.
    tolerable_shortfall_fraction: float = Field(default=0.65, ge=0)
    # With migrate: tokens that each running request may still get on average, before memory is full.
    migrate_below_tokens: float = Field(default=32.0, ge=0)  # who has less gives requests away
    migrate_above_tokens: float = Field(default=96.0, ge=0)  # who has more takes them
    prepare_timeout_s: float = Field(default=10.0, gt=0)  # of a drop; nothing has changed for anybody until then
    restore_timeout_s: float = Field(default=600.0, gt=0)  # for missing parameters to come back
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")
    log_format: LogFormat = "console"
    shutdown_timeout_s: float = Field(default=5.0, ge=0)


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m services.planner", description="Decides which instances serve together."
    )
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (50053); 0: any free one")
    parser.add_argument("--advertise-host", dest="advertise_host", help="name under which others reach this process")
    parser.add_argument("--metrics-port", dest="metrics_port", type=int, help="Prometheus metrics; 0: none")
    parser.add_argument("--redis-url", dest="redis_url", help="state server (redis://127.0.0.1:6379)")
    parser.add_argument("--planner-id", dest="planner_id", help="tells replicas apart (minted at every start)")
    parser.add_argument("--monitor-address", dest="monitor_address", help="host:port; default: looked up")
    parser.add_argument("--leadership-ttl-s", dest="leadership_ttl_s", type=float, help="lease of the active one (3)")
    parser.add_argument(
        "--overload-policy",
        dest="overload_policy",
        choices=[policy.value for policy in OverloadPolicy],
        help="what to do when KV memory runs short: drop parameters (default); leave it to the workers; move requests"
        " between them; or have parameters dropped from the start",
    )
    parser.add_argument(
        "--pipeline-degree", dest="pipeline_degree", type=int, help="instances of a pipeline, with static-pipeline (2)"
    )
    parser.add_argument(
        "--restore", dest="restore", choices=("on", "off"), help="with drop: off never takes parameters back on board"
    )
    parser.add_argument(
        "--migrate-below-tokens",
        dest="migrate_below_tokens",
        type=float,
        help="with migrate: who has room for fewer tokens of each running request gives requests away (32)",
    )
    parser.add_argument(
        "--migrate-above-tokens",
        dest="migrate_above_tokens",
        type=float,
        help="with migrate: who has room for more of them takes requests (96)",
    )
    parser.add_argument("--log-level", dest="log_level", help="debug, info, warning or error")
    parser.add_argument("--log-format", dest="log_format", help="console or json")
    parser.add_argument("--shutdown-timeout", dest="shutdown_timeout_s", type=float, help="seconds for calls to end")
    return parser
