"""Configuration of services, from four sources; later ones take precedence: defaults, a YAML file, environment
variables BALLAST_<SERVICE>__*, flags. Unknown keys are errors.

Each service declares a subclass of `Settings` in its `config.py`. Each field is a flag, a variable and a key of the
file; the string below it is its help text. Fields for developers only are given as `--dev NAME=VALUE`.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, SettingsError

from ballast.common.errors import ConfigError
from ballast.service.redact import redact

_DEV = "dev"


class Settings(BaseModel):
    """Base class of every service's configuration.

    Attributes:
        service: Name of the section in the file and of the environment prefix.
        summary: One-line description for the help text.
        short_flags: Flag -> a shorter or older alias, both without dashes.
        developer: Names of fields that are given as `--dev NAME=VALUE`, or below `dev` in the file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    service: ClassVar[str]
    summary: ClassVar[str] = ""
    short_flags: ClassVar[Mapping[str, str]] = {}
    developer: ClassVar[frozenset[str]] = frozenset()


S = TypeVar("S", bound=Settings)


def load_settings(settings: type[S], argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> S:
    """Read the settings from all sources. `argv`: the flags.

    Raises:
        ConfigError: a setting or file is invalid; the message names it.
        SystemExit: a flag is unknown, as in argparse.
    """
    config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config.add_argument("--config")
    found, others = config.parse_known_args(argv)
    given = read_flags(settings, others)
    file = found.config or environ.get("BALLAST_CONFIG")
    in_file = _read_file(Path(file), settings.service) if file else {}
    return build(settings, _merged(settings, [in_file, _read_environment(settings, environ), given]))


def _merged(settings: type[Settings], sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge sources into one mapping; later ones override earlier ones. The entries of `dev` become ordinary ones."""
    merged: dict[str, Any] = {}
    for source in sources:
        public = {name: value for name, value in source.items() if name != _DEV}
        for name in public:
            if name in settings.developer:
                why = f"is for developers: give it as --dev {name}=VALUE, or below {_DEV}"
                raise ConfigError(f"{settings.service}.{name}", why)
        hidden: object = source.get(_DEV, {})
        if not isinstance(hidden, dict):
            raise ConfigError(f"{settings.service}.{_DEV}", "must be a mapping of names to values")
        for name in cast(dict[str, Any], hidden):
            if name not in settings.developer:
                known = ", ".join(sorted(settings.developer)) or "none"
                raise ConfigError(f"{settings.service}.{_DEV}.{name}", f"unknown setting; there are {known}")
        merged |= {**public, **cast(dict[str, Any], hidden)}
    return merged


def read_flags(settings: type[Settings], argv: Sequence[str]) -> dict[str, Any]:
    """The values of the flags in `argv`, not yet validated. Raises ConfigError for a flag without its NAME=VALUE."""
    prefix = f"BALLAST_{settings.service.upper()}__"
    parser = argparse.ArgumentParser(
        prog=f"python -m services.{settings.service}",
        usage="%(prog)s [SETTINGS]",
        description=settings.summary,
        epilog=f"--config FILE or BALLAST_CONFIG: a YAML file with the same settings. Each is also a variable:"
        f" {prefix}LOG_LEVEL=debug. Flags beat variables, which beat the file.",
    )
    try:
        source = CliSettingsSource[argparse.ArgumentParser](
            cast(type[BaseSettings], _with_flags(settings)),
            cli_parse_args=list(argv),
            cli_kebab_case=True,
            cli_avoid_json=True,
            cli_hide_none_type=True,
            cli_shortcuts={name: [short] for name, short in settings.short_flags.items()},
            root_parser=parser,
        )
    except SettingsError as error:
        raise ConfigError(settings.service, f"a flag must be NAME=VALUE: {error}") from error
    return source()


def _with_flags(settings: type[Settings]) -> type[BaseModel]:
    """A model with a field for each flag, and one mapping `dev` for the developers' settings."""
    fields: dict[str, Any] = {
        n: (f.annotation, f) for n, f in settings.model_fields.items() if n not in settings.developer
    }
    if settings.developer:
        names = ", ".join(sorted(settings.developer))
        fields[_DEV] = (
            dict[str, str],
            Field(default_factory=dict[str, str], description=f"For developers, NAME=VALUE, several times: {names}."),
        )
    return create_model(settings.__name__, __config__=settings.model_config, **fields)


def build(settings: type[S], values: Mapping[str, Any]) -> S:
    """Construct settings from values, and validate them.

    Raises:
        ConfigError: a value is invalid; the message names the first invalid one.
    """
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"])) or settings.service
        why = "unknown setting" if first["type"] == "extra_forbidden" else first["msg"]
        got = "" if first["type"] in ("missing", "extra_forbidden") else redact(f" (got {first['input']!r})")
        raise ConfigError(f"{settings.service}.{path}", why + got) from error


def _read_file(path: Path, service: str) -> dict[str, Any]:
    try:
        content: object = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(str(path), "must be a mapping of service names to settings")
    section = cast(dict[str, object], content).get(service, {})
    known = {"dispatcher", "gateway", "jobs", "planner", "monitor", "worker"}
    unknown = [name for name in cast(dict[object, object], content) if name not in known]
    if unknown:
        raise ConfigError(str(path), f"unknown section {unknown[0]!r}; sections are the names of the services")
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {service}", "must be a mapping")
    return cast(dict[str, Any], section)


def _read_environment(settings: type[Settings], environ: Mapping[str, str]) -> dict[str, Any]:
    prefix = f"BALLAST_{settings.service.upper()}__"
    found = {name.removeprefix(prefix).lower(): text for name, text in environ.items() if name.startswith(prefix)}
    return {name: _parse(settings, name, text) for name, text in sorted(found.items())}


def _parse(settings: type[Settings], name: str, text: str) -> object:
    """Parse an environment variable: lists and mappings as YAML (or JSON); other values stay text for `build`."""
    field = settings.model_fields.get(name)
    source = EnvSettingsSource(cast(type[BaseSettings], settings))
    if name != _DEV and (field is None or not source.field_is_complex(field)):
        return text
    try:
        return cast(object, yaml.safe_load(text))
    except yaml.YAMLError as error:
        variable = f"BALLAST_{settings.service.upper()}__{name.upper()}"
        raise ConfigError(variable, f"is not valid YAML: {error}") from error
