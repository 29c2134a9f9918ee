"""Writes the pages that are generated from the code: `make pages`. A test compares them with the committed ones.

docs/configure.md lists all settings of all services; docs/metrics.md has a table of all metrics between two marks;
docs/transitions.md describes the states, events and deadlines of transitions.
"""

import dataclasses
import importlib
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal, Union, get_args, get_origin

from prometheus_client import CollectorRegistry
from pydantic import ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ballast.common.ids import DispatcherId
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.units import human_bytes
from ballast.service.metrics import REGISTRY
from ballast.service.security import GuardedSettings, ServiceSettings
from ballast.service.settings import Settings
from services.dispatcher.config import DispatcherSettings
from services.dispatcher.core.dispatcher import DispatcherCore
from services.dispatcher.core.limits import Limits
from services.dispatcher.core.placement import PlacementRules
from services.dispatcher.policy.freeness import RoutingRules
from services.dispatcher.shell.metrics import DispatcherMetrics
from services.gateway.config import GatewaySettings
from services.gateway.metrics import GatewayMetrics
from services.jobs.config import JobsSettings
from services.monitor.config import MonitorSettings
from services.planner.config import PlannerSettings
from services.worker import metrics as worker_metrics
from services.worker.config import WorkerSettings
from services.worker.pipeline.progress import MigrationTotals
from services.worker.pipeline.stage_clock import StageTimes
from tests.support import transition_page

DOCS = Path(__file__).resolve().parent
CONFIGURE, METRICS, TRANSITIONS = "configure.md", "metrics.md", "transitions.md"
BEGIN, END = "<!-- begin metrics: written by docs/generate.py -->", "<!-- end metrics -->"
SERVICES: tuple[type[Settings], ...] = (
    GatewaySettings,
    DispatcherSettings,
    WorkerSettings,
    MonitorSettings,
    PlannerSettings,
    JobsSettings,
)
_HEAD = """# Configure

`make pages` generates this page from the settings classes; `python -m services.NAME --help` prints the same texts.

| source of a setting | example |
|---|---|
| flag | `python -m services.worker --device-memory-bytes 16GiB --overload-policy drop` |
| environment | `BALLAST_WORKER__DEVICE_MEMORY_BYTES=16GiB`, with two underscores between service and setting |
| YAML file | `--config FILE` or `BALLAST_CONFIG=FILE` |

Flags take precedence over the environment, and the environment over the file. All services can share one file: each
reads its own section. An unknown name is an error.

```yaml
worker:
  model: Qwen/Qwen2.5-7B-Instruct
  device_memory_bytes: 16GiB
monitor:
  dwell_s: 5
```

`ballast up` passes its flags and its environment to the services. For the variables `BALLAST_ADDRESS`, `BALLAST_TOKEN`,
`BALLAST_CA_FILE` and `BALLAST_TLS_DIR` of the command line and the SDK see [security](security.md).
"""


_DEV_HEAD = """These settings are for tests and comparisons; operators do not need them. They are set with
`--dev NAME=VALUE`, with `BALLAST_WORKER__DEV={NAME: VALUE}`, or below `dev` in the file.
"""


def configure_page() -> str:
    shared = {"every service": set(GuardedSettings.model_fields)}
    shared["every service but the gateway"] = set(ServiceSettings.model_fields) - shared["every service"]
    lines = [_HEAD]
    for whom, names in shared.items():
        lines += [
            f"## {whom.capitalize()}\n",
            *_table(f for f in ServiceSettings.model_fields.items() if f[0] in names),
        ]
    said = set[str]().union(*shared.values())
    for settings in SERVICES:
        name = settings.service
        lines += [
            f"## {name.capitalize()}\n",
            f"{settings.summary} `python -m services.{name}`, `BALLAST_{name.upper()}__...`\n",
            *_table(f for f in settings.model_fields.items() if f[0] not in said | settings.developer),
        ]
    lines += [
        "## For developers\n",
        _DEV_HEAD,
        "| service | name | values | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for settings in SERVICES:
        for name in sorted(settings.developer):
            field = settings.model_fields[name]
            cells = (settings.service, f"`{name}`", _values(field.annotation), _default(field), _text(field))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _table(fields: Iterable[tuple[str, FieldInfo]]) -> Iterator[str]:
    yield "| flag | values | default | meaning |"
    yield "|---|---|---|---|"
    for path, field in fields:
        values = "no value" if any("ImplicitFlag" in repr(one) for one in field.metadata) else _values(field.annotation)
        cells = (f"`--{path.replace('_', '-')}`", values, _default(field), _text(field))
        yield f"| {' | '.join(cells)} |"
    yield ""


def _values(annotation: object) -> str:
    """The accepted values of a setting, as text: alternatives, or the name of a type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, Union):
        return _values(next(one for one in arguments if one is not type(None)))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{one.value}`" for one in annotation)
    names = {bool: "`true`, `false`", int: "whole number", float: "number", ByteSize: "size", Path: "path"}
    return names.get(annotation, "text") if isinstance(annotation, type) else "text"


def _default(field: FieldInfo) -> str:
    default = field.get_default()
    if field.default_factory is not None or default is None:
        return ""
    if default is PydanticUndefined:
        return "*required*"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, ByteSize):
        return f"`{human_bytes(default).replace('.0', '').replace(' ', '')}`"
    return f"`{default.value if isinstance(default, Enum) else default}`"


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


# ---------------------------------------------------------------- metrics


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: its name, its labels and its help text."""

    name: str
    labels: tuple[str, ...]
    text: str


def metrics_page(page: str) -> str:
    """The page `page` with a new table of all metrics between the two marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{metrics_table()}\n{END}{rest.partition(END)[2]}"


def metrics_table() -> str:
    lines = ["| metric | service | labels | meaning |", "|---|---|---|---|"]
    known: set[str] = set()
    for service, registry in _registries():
        for family in sorted(_families(registry), key=lambda family: family.name):
            if family.name not in known:
                known.add(family.name)
                labels = ", ".join(f"`{label}`" for label in family.labels)
                lines.append(f"| `{family.name}` | {service} | {labels} | {family.text} |")
    return "\n".join(lines)


def _registries() -> Iterator[tuple[str, CollectorRegistry]]:
    """(service, registry) pairs; the shared registry again after each import that adds metrics to it."""
    importlib.import_module("ballast.service.refusals")
    yield "all", REGISTRY
    yield "gateway", _of_gateway()
    yield "dispatcher", _of_dispatcher()
    yield "worker", _of_worker()
    for service, module in (
        ("monitor", "services.monitor.shell"),
        ("planner", "services.planner.metrics"),
        ("jobs", "services.jobs.metrics"),
    ):
        importlib.import_module(module)
        yield service, REGISTRY


def _families(registry: CollectorRegistry) -> Iterator[Family]:
    # A registry has no public access to the labels of metrics without samples.
    for collector in list(registry._collector_to_names):  # pyright: ignore[reportPrivateUsage]
        described = [collector] if hasattr(collector, "_labelnames") else list(collector.collect())
        for one in described:
            kind, labels = getattr(one, "_type", "") or getattr(one, "type", ""), getattr(one, "_labelnames", ())
            name = str(getattr(one, "_name", "") or getattr(one, "name", ""))
            text = str(getattr(one, "_documentation", "") or getattr(one, "documentation", ""))
            if name.startswith("ballast_"):
                yield Family(name + ("_total" if kind == "counter" else ""), tuple(labels), text)


def _of_gateway() -> CollectorRegistry:
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    return registry


def _of_dispatcher() -> CollectorRegistry:
    registry = CollectorRegistry()
    DispatcherMetrics(DispatcherCore(DispatcherId("d"), Limits(), PlacementRules(), RoutingRules()), registry)
    return registry


_NO_MEMORY = MemoryReport(budget_bytes=0, parameter_bytes=0, kv_bytes=0, free_bytes=0)


def _of_worker() -> CollectorRegistry:
    registry = CollectorRegistry()
    counts = dict.fromkeys((field.name for field in dataclasses.fields(LoadReport)), 0)
    nothing = LoadReport(**{**counts, "memory": _NO_MEMORY})  # pyright: ignore[reportArgumentType]
    worker_metrics.export(
        lambda: nothing,
        registry,
        lambda: StageTimes(busy_s=0, idle_s=0, network_s=0, send_s=0, steps=0),
        MigrationTotals(),
    )
    registry.register(worker_metrics.LinkCollector(lambda: {"": 0}))
    return registry


def main(folder: Path = DOCS) -> None:
    (folder / CONFIGURE).write_text(configure_page())
    (folder / METRICS).write_text(metrics_page((DOCS / METRICS).read_text()))
    (folder / TRANSITIONS).write_text(transition_page.page())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
