"""Settings: sources in order, unknown keys refused, errors that name what is wrong."""

import argparse
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from ballast.common.errors import ConfigError
from ballast.service.settings import Section, Settings, build, load_settings
from services.monitor.config import MonitorSettings
from services.monitor.config import flags as monitor_flags
from services.planner.config import PlannerSettings
from services.planner.config import flags as planner_flags


class Queue(Section):
    max_requests: int = Field(default=10, gt=0)
    classes: list[str] = Field(default_factory=lambda: ["default"])


class Example(Settings):
    service: ClassVar[str] = "worker"
    port: int = 1
    name: str = "a"
    queue: Queue = Queue()


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--max-requests", dest="queue.max_requests", type=int)
    return parser


def load(*argv: str, **environ: str) -> Example:
    return load_settings(Example, flags(), argv, environ)


def test_flags_beat_the_environment_which_beats_the_file_which_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "ballast.yaml"
    file.write_text("worker: {port: 2, name: file, queue: {max_requests: 20}}\nplanner: {}\n")
    assert load() == Example()
    assert load("--config", str(file)) == Example(port=2, name="file", queue=Queue(max_requests=20))
    environ = {
        "BALLAST_CONFIG": str(file),
        "BALLAST_WORKER__PORT": "3",
        "BALLAST_WORKER__QUEUE__MAX_REQUESTS": "30",
        "BALLAST_WORKER__QUEUE__CLASSES": '["batch"]',
        "BALLAST_PLANNER__PORT": "9",
    }
    assert load(**environ) == Example(port=3, name="file", queue=Queue(max_requests=30, classes=["batch"]))
    given = load("--port", "4", "--max-requests", "40", **environ)
    assert (given.port, given.queue.max_requests, given.name) == (4, 40, "file")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("worker: {prot: 2}", r"worker\.prot: unknown setting"),
        ("worker: {queue: {max_requests: 0}}", r"worker\.queue\.max_requests: .*greater than 0.*got 0"),
        ("worker: {port: many}", r"worker\.port: .*got 'many'"),
        ("wroker: {}", "unknown section 'wroker'"),
        ("[1, 2]", "must be a mapping"),
        ("worker: [1]", "must be a mapping"),
        ("worker: {port: [", "not valid YAML"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, content: str, complaint: str) -> None:
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


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().port = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_every_flag_of_the_control_plane_names_a_setting() -> None:
    for settings, parser in ((MonitorSettings, monitor_flags()), (PlannerSettings, planner_flags())):
        given = vars(parser.parse_args([]))
        assert {dest.partition(".")[0] for dest in given} <= set(settings.model_fields)
        ids = {getattr(build(settings, {}), f"{settings.service}_id") for _ in range(2)}
        assert len(ids) == 2, "replicas that are not named can be told apart"
