"""Reads the parts of the compose format that this project uses, and determines what each replica runs on one machine.

On one machine all replicas share the loopback, so ports are replaced by free ones, service names by 127.0.0.1, and
paths in containers by folders. Commands and environment are otherwise unchanged.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from ballast.common.errors import ConfigError

HEALTHY, STARTED, COMPLETED = "service_healthy", "service_started", "service_completed_successfully"
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?::-([^}]*))?\}|(\w+))")
_LOCAL_PORT = re.compile(r"\b(?:127\.0\.0\.1|localhost):(\d+)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A service of a compose file, with variables substituted."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    volumes: Mapping[str, str]  # path in the container -> path on the host, or name of a volume
    depends_on: Mapping[str, str]  # service -> condition
    health_command: tuple[str, ...] | None
    published: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict[str, Any])  # all keys as written in the file. Any: of any type

    @property
    def own_ports(self) -> list[int]:
        """Ports on which the service listens, according to its environment and its health check."""
        named = [int(value) for key, value in self.environment.items() if key.endswith("PORT") and int(value)]
        asked = [int(port) for part in self.health_command or () for port in _LOCAL_PORT.findall(part)]
        return sorted({*named, *asked})


@dataclass(frozen=True, slots=True)
class Placement:
    """Replacements of ports, addresses and paths in a replica's configuration."""

    ports: Mapping[int, int]  # the replica's ports: in the container -> on this machine
    peers: Mapping[str, str]  # "service:port" -> comma-separated "127.0.0.1:port" of its replicas
    paths: Mapping[str, str]  # paths: in the container -> on this machine

    def text(self, text: str) -> str:
        for peer, address in self.peers.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(peer)}\b", address, text)
        text = _LOCAL_PORT.sub(lambda found: f"127.0.0.1:{self.ports.get(int(found[1]), int(found[1]))}", text)
        for inside, outside in sorted(self.paths.items(), reverse=True):
            text = re.sub(rf"(?<![\w./-]){re.escape(inside)}(?![\w-])", outside, text)
        return text

    def command(self, command: tuple[str, ...]) -> list[str]:
        return [self.text(part) for part in command]

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        placed: dict[str, str] = {}
        for key, value in environment.items():
            if key.endswith("PORT"):
                placed[key] = str(self.ports.get(int(value), int(value)))
            elif value == "0.0.0.0":
                placed[key] = "127.0.0.1"
            else:
                placed[key] = self.text(value)
        return placed


def read_compose(path: Path, environ: Mapping[str, str], profiles: Collection[str] = ()) -> dict[str, ServiceSpec]:
    """The services that `docker compose up` starts: those without a profile, and those of `profiles`.

    Raises:
        ConfigError: the file cannot be read, or uses something unsupported; the message says where.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from error
    services = _mapping(_mapping(content, str(path)).get("services"), f"{path}: services")
    filled = {name: _mapping(_fill(raw, environ), f"{path}: {name}") for name, raw in services.items()}
    wanted = {name: raw for name, raw in filled.items() if not {*raw.get("profiles", ())} - set(profiles)}
    return {name: _service(name, raw) for name, raw in wanted.items()}


def start_order(services: Mapping[str, ServiceSpec]) -> list[ServiceSpec]:
    """All services, each after its dependencies.

    Raises:
        ConfigError: a dependency is circular or missing.
    """
    order: list[ServiceSpec] = []
    left = dict(sorted(services.items()))
    while left:
        ready = [name for name, spec in left.items() if not any(other in left for other in spec.depends_on)]
        for name in ready:
            unknown = set(left[name].depends_on) - set(services)
            if unknown:
                raise ConfigError(f"services.{name}.depends_on", f"no such service: {', '.join(sorted(unknown))}")
            order.append(left.pop(name))
        if not ready:
            raise ConfigError("depends_on", f"a circle among {', '.join(left)}")
    return order


def _service(name: str, raw: Mapping[str, Any]) -> ServiceSpec:
    health = _mapping(raw.get("healthcheck") or {}, f"{name}.healthcheck").get("test")
    volumes = [str(volume).split(":") for volume in raw.get("volumes", ())]
    depends_on = _mapping(raw.get("depends_on") or {}, f"{name}.depends_on")
    return ServiceSpec(
        name=name,
        command=_strings(raw.get("command"), f"{name}.command"),
        environment={k: str(v) for k, v in _mapping(raw.get("environment") or {}, f"{name}.environment").items()},
        volumes={parts[1]: parts[0] for parts in volumes},
        depends_on={other: str(how["condition"]) for other, how in depends_on.items()},
        health_command=None if health is None else _exec_form(health, name),
        published=tuple(str(port) for port in raw.get("ports", ())),
        raw=raw,
    )


def _exec_form(test: object, name: str) -> tuple[str, ...]:
    words = _strings(test, f"{name}.healthcheck.test")
    if words[0] != "CMD":
        raise ConfigError(f"{name}.healthcheck.test", "must be a list that begins with CMD")
    return words[1:]


def _fill(value: object, environ: Mapping[str, str]) -> object:
    """Substitute ${NAME}, ${NAME:-default} and $$ in every string."""
    if isinstance(value, str):

        def replace(found: re.Match[str]) -> str:
            if found[1]:
                return "$"
            return environ.get(found[2] or found[4]) or found[3] or ""

        return _VARIABLE.sub(replace, value)
    if isinstance(value, dict):
        return {key: _fill(inner, environ) for key, inner in cast(dict[str, object], value).items()}
    if isinstance(value, list):
        return [_fill(inner, environ) for inner in cast(list[object], value)]
    return value


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(where, "must be a mapping")
    return cast(dict[str, Any], value)


def _strings(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(where, "must be a list of words")
    return tuple(str(word) for word in cast(list[object], value))
