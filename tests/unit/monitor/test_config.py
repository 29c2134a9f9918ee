"""Flags and environment variables reach their settings. Thresholds that would make drops and restores alternate are
refused.
"""

import pytest

from ballast.common.errors import ConfigError
from ballast.service.settings import load_settings
from ballast.service.state import StateServer
from services.monitor.__main__ import build_shell
from services.monitor.config import MonitorSettings


def load(*argv: str, **environ: str) -> MonitorSettings:
    return load_settings(MonitorSettings, argv, environ)


def test_flags_and_environment_reach_the_rules_of_the_core() -> None:
    settings = load("--dwell-s", "7.5", BALLAST_MONITOR__OVERLOAD_THRESHOLD_FRACTION="1.1")
    pressure = build_shell(settings, StateServer(settings.redis_url)).core.pressure
    pressure.rules.check()
    rules = pressure.rules
    assert (rules.dwell_s, rules.overload_threshold_fraction, rules.relief_threshold_fraction) == (7.5, 1.1, 0.8)


@pytest.mark.parametrize(
    ("name", "value"), [("DEV", "{relief_threshold_fraction: 0.9}"), ("OVERLOAD_THRESHOLD_FRACTION", "0.7")]
)
def test_thresholds_too_close_to_each_other_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="relief_threshold_fraction must be at least"):
        load(**{f"BALLAST_MONITOR__{name}": value})


@pytest.mark.parametrize("name", ["LEASE_S", "DWELL_S"])
def test_times_below_zero_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"monitor.{name.lower()}"):
        load(**{f"BALLAST_MONITOR__{name}": "-1"})
