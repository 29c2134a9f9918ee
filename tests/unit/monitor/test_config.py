"""Flags and environment reach their settings; thresholds that would make drops and restores chase each other do not."""

import pytest

from ballast.common.errors import ConfigError
from ballast.service.settings import load_settings
from ballast.service.state import StateServer
from services.monitor.__main__ import build_shell
from services.monitor.config import MonitorSettings


def load(*argv: str, **environ: str) -> MonitorSettings:
    return load_settings(MonitorSettings, argv, environ)


def test_flags_and_environment_reach_the_thresholds() -> None:
    settings = load("--dwell-s", "7.5", BALLAST_MONITOR__PRESSURE__RELIEF_AFTER_S="11")
    assert (settings.pressure.dwell_s, settings.pressure.relief_after_s) == (7.5, 11.0)


def test_the_rules_of_the_core_are_the_settings() -> None:
    settings = load(BALLAST_MONITOR__PRESSURE__TREND_WINDOW_S="3", BALLAST_MONITOR__TICK_INTERVAL_S="0.5")
    pressure = build_shell(settings, StateServer(settings.redis_url)).core.pressure
    pressure.rules.check()
    for name, value in settings.pressure.model_dump().items():
        assert getattr(pressure.rules, name) == value
    assert pressure.history.maxlen is not None
    assert pressure.history.maxlen * settings.tick_interval_s >= settings.pressure.trend_window_s


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RELIEF_THRESHOLD_FRACTION", "0.9"),
        ("OVERLOAD_ARMING_FRACTION", "1.01"),
        ("OVERLOAD_THRESHOLD_FRACTION", "0.7"),
    ],
)
def test_thresholds_out_of_order_are_refused_with_the_order(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="relief_threshold_fraction < overload_arming_fraction <=") as caught:
        load(**{f"BALLAST_MONITOR__PRESSURE__{name}": value})
    assert "monitor.pressure" in str(caught.value)


@pytest.mark.parametrize("name", ["HORIZON_S", "TREND_WINDOW_S", "DWELL_S"])
def test_times_below_zero_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"monitor.pressure.{name.lower()}"):
        load(**{f"BALLAST_MONITOR__PRESSURE__{name}": "-1"})
