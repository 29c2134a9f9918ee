"""Flags reach their settings, and errors name the wrong value."""

from pathlib import Path

import pytest

from ballast.common.errors import ConfigError
from ballast.service.settings import load_settings
from services.dispatcher.config import DispatcherSettings


def load(*argv: str, **environ: str) -> DispatcherSettings:
    return load_settings(DispatcherSettings, ["--model", "m", *argv], environ)


def test_every_flag_has_its_setting() -> None:
    settings = load(
        *(
            "--host",
            "0.0.0.0",
            "--port",
            "1",
            "--advertise-host",
            "h",
            "--metrics-port",
            "2",
            "--redis-url",
            "redis://x",
        ),
        *("--dispatcher-id", "d", "--max-num-queued-reqs", "3", "--max-num-queued-tokens", "4"),
        *("--dev", "no_worker_timeout_s=5", "--dev", "client_stall_timeout_s=6", "--shutdown-timeout", "7"),
        *("--log-level", "error", "--log-format", "json", "--metrics-host", "m"),
    )
    assert settings.model == Path("m")
    assert (settings.max_num_queued_reqs, settings.max_num_queued_tokens) == (3, 4)
    assert (settings.no_worker_timeout_s, settings.client_stall_timeout_s, settings.shutdown_timeout_s) == (5, 6, 7)
    assert (settings.advertise_host, settings.dispatcher_id, settings.log_format) == ("h", "d", "json")


def test_the_environment_reaches_settings_without_a_flag() -> None:
    assert load(BALLAST_DISPATCHER__DEV="{replay_limit: 5}").replay_limit == 5


@pytest.mark.parametrize(
    ("argv", "named"),
    [(("--port", "70000"), "port"), (("--max-num-queued-reqs", "0"), "max_num_queued_reqs")],
)
def test_a_wrong_value_is_named(argv: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"dispatcher\.{named}"):
        load(*argv)


def test_the_model_is_required() -> None:
    with pytest.raises(ConfigError, match=r"dispatcher\.model"):
        load_settings(DispatcherSettings, [], {})
