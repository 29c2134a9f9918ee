"""Settings have a fixed order of sources, unknown keys are refused, and errors name the wrong value."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from ballast.common.errors import ConfigError
from ballast.service.security import ServiceSettings
from ballast.service.settings import Settings, build, load_settings, read_flags
from services.dispatcher.config import DispatcherSettings
from services.monitor.config import MonitorSettings
from services.planner.config import PlannerSettings
from services.worker.config import WorkerSettings


class Example(Settings):
    service: ClassVar[str] = "worker"
    port: int = 1
    name: str = "a"
    max_request_count: int = Field(default=10, gt=0)
    classes: list[str] = Field(default_factory=lambda: ["default"])
    short_flags: ClassVar[Mapping[str, str]] = {"max-request-count": "max-requests"}


def load(*argv: str, **environ: str) -> Example:
    return load_settings(Example, argv, environ)


def test_flags_override_environment_file_and_defaults_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "ballast.yaml"
    file.write_text("worker: {port: 2, name: file, max_request_count: 20}\nplanner: {}\n")
    assert load() == Example()
    assert load("--config", str(file)) == Example(port=2, name="file", max_request_count=20)
    environ = {
        "BALLAST_CONFIG": str(file),
        "BALLAST_WORKER__PORT": "3",
        "BALLAST_WORKER__MAX_REQUEST_COUNT": "30",
        "BALLAST_WORKER__CLASSES": '["batch"]',
        "BALLAST_PLANNER__PORT": "9",
    }
    assert load(**environ) == Example(port=3, name="file", max_request_count=30, classes=["batch"])
    given = load("--port", "4", "--max-requests", "40", **environ)
    assert (given.port, given.max_request_count, given.name) == (4, 40, "file")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("worker: {prot: 2}", r"worker\.prot: unknown setting"),
        ("worker: {max_request_count: 0}", r"worker\.max_request_count: .*greater than 0.*got 0"),
        ("worker: {port: many}", r"worker\.port: .*got 'many'"),
        ("wroker: {}", "unknown section 'wroker'"),
        ("1: {}\nwroker: {}", "unknown section 1"),
        ("[1, 2]", "must be a mapping"),
        ("worker: [1]", "must be a mapping"),
        ("worker: {port: [", "not valid YAML"),
    ],
)
def test_a_bad_file_is_named_with_its_error(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "ballast.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        load("--config", str(file))


def test_a_missing_file_and_a_bad_variable_are_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/x\.yaml: cannot be read"):
        load("--config", "/nowhere/x.yaml")
    with pytest.raises(ConfigError, match=r"worker\.port"):
        load(BALLAST_WORKER__PORT="x")
    with pytest.raises(ConfigError, match=r"worker\.nothing: unknown setting"):
        load(BALLAST_WORKER__NOTHING="x")


@pytest.mark.parametrize("name", ["DEV", "CLASSES"])
def test_a_variable_that_is_not_valid_yaml_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"BALLAST_WORKER__{name}: is not valid YAML"):
        load(**{f"BALLAST_WORKER__{name}": "{"})


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().port = 5  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("settings", [DispatcherSettings, MonitorSettings, PlannerSettings, WorkerSettings])
def test_every_setting_is_a_flag_with_help(settings: type[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings(settings, ["--help"], {})
    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    for path, field in settings.model_fields.items():
        assert field.description, f"{path} lacks the docstring that serves as its help"
        if path in settings.developer:
            assert path in shown.partition("For developers")[2], path
            continue
        assert re.search(rf"--{path.replace('_', '-')}[ ,]", shown), path
        assert field.description.split()[0] in shown, path


def test_settings_for_developers_are_given_in_one_mapping(tmp_path: Path) -> None:
    file = tmp_path / "ballast.yaml"
    file.write_text("dispatcher: {dev: {growth_tokens: 5, replay_limit: 7}}")
    environ = {"BALLAST_CONFIG": str(file), "BALLAST_DISPATCHER__DEV": "{growth_tokens: 6}"}
    given = load_settings(DispatcherSettings, ["--model", "m", "--dev", "prefix_marks=2"], environ)
    assert (given.replay_limit, given.growth_tokens, given.prefix_marks) == (7, 6, 2)
    with pytest.raises(SystemExit):
        load_settings(DispatcherSettings, ["--model", "m", "--growth-tokens", "5"], {})


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        (
            {"BALLAST_DISPATCHER__GROWTH_TOKENS": "5"},
            "growth_tokens: is for developers: give it as --dev growth_tokens=",
        ),
        (
            {"BALLAST_DISPATCHER__DEV": "{grow: 5}"},
            "dev.grow: unknown setting; there are client_stall_timeout_s, growth_tok",
        ),
        ({"BALLAST_DISPATCHER__DEV": "7"}, "dev: must be a mapping"),
        ({"BALLAST_DISPATCHER__DEV": "{growth_tokens: -5}"}, "growth_tokens: Input should be greater"),
    ],
)
def test_wrong_settings_for_developers_are_named(environ: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"dispatcher.{why}")):
        load_settings(DispatcherSettings, ["--model", "m"], environ)


@pytest.mark.parametrize("settings", [DispatcherSettings, WorkerSettings])
def test_older_and_shorter_flags_still_work(settings: type[Settings]) -> None:
    for full, short in settings.short_flags.items():
        assert read_flags(settings, [f"--{full}", "7"]) == read_flags(settings, [f"--{short}", "7"])


def test_an_unknown_flag_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as ended:
        load("--prot", "2")
    assert ended.value.code == 2


@pytest.mark.parametrize("settings", [MonitorSettings, PlannerSettings])
def test_replicas_without_names_can_be_distinguished(settings: type[Settings]) -> None:
    assert len({getattr(build(settings, {}), f"{settings.service}_id") for _ in range(2)}) == 2


# Addresses and names of services, and settings that all replicas share.
_OF_REPLICAS = {"port", "monitor_id", "planner_id", "monitor_address", "leadership_ttl_s", "shutdown_timeout_s"}
_TOLD = {"otlp_traces_endpoint", "scale_webhook", "scale_webhook_secret_file"}  # addresses and secrets of other systems
_NO_POLICY = {*_OF_REPLICAS, *_TOLD, *ServiceSettings.model_fields}


def test_settings_that_decide_on_drops_are_explained() -> None:
    found = {
        f"{settings.service}.{path}": field.description or ""
        for settings in (MonitorSettings, PlannerSettings)
        for path, field in settings.model_fields.items()
        if path not in _NO_POLICY
    }
    assert len(found) <= 16, sorted(found)  # four of them are about parking
    assert all(len(text) > 50 for text in found.values()), "a help text says what it is, and why one would change it"


@pytest.mark.parametrize(
    ("settings", "gone"),
    [(MonitorSettings, "pressure"), (MonitorSettings, "tick_interval_s"), (PlannerSettings, "compare")],
)
def test_a_removed_setting_is_named(settings: type[Settings], gone: str, tmp_path: Path) -> None:
    service = settings.service
    with pytest.raises(ConfigError, match=rf"{service}\.{gone}: unknown setting"):
        load_settings(settings, [], {f"BALLAST_{service.upper()}__{gone.upper()}": "1"})
    file = tmp_path / "ballast.yaml"
    file.write_text(f"{service}: {{{gone}: 1}}\n")
    with pytest.raises(ConfigError, match=rf"{service}\.{gone}: unknown setting"):
        load_settings(settings, ["--config", str(file)], {})
    with pytest.raises(SystemExit) as ended:
        load_settings(settings, [f"--{gone.replace('_', '-')}", "1"], {})
    assert ended.value.code == 2
