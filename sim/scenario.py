"""A simulation as a file: which trace, model and cluster, and what is compared."""

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ballast.common.errors import ConfigError


class Scenario(BaseModel):
    """Unknown keys are errors. Whoever runs it may give the trace, and change the rest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str
    source: str = ""  # what it reproduces
    trace: str | None = None  # relative to the file; None: it must be given
    lengths: str | None = None  # a data set's name; None: those of the trace
    model: str
    cluster: str
    policies: tuple[str, ...] = ("recompute", "drop")
    rate_scale: float = Field(1.0, gt=0)
    time_scale: float = Field(1.0, gt=0)
    length_scale: float = Field(1.0, gt=0)
    limit: int | None = Field(None, ge=1)
    seed: int = 0
    deadline_s: float = Field(3600.0, gt=0)
    block_size: int = Field(64, ge=1)
    max_num_seqs: int = Field(256, ge=1)
    max_num_batched_tokens: int = Field(2048, ge=1)
    microbatching: Literal["lookahead", "token-count"] = "lookahead"


def read_scenario(path: Path) -> Scenario:
    """
    Raises:
        ConfigError: naming the file and the first field that does not fit.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(str(path), f"is not YAML: {error}") from error
    found = make_scenario(content, str(path))
    if found.trace is None:
        return found
    return found.model_copy(update={"trace": str(path.parent / found.trace)})


def make_scenario(content: object, where: str) -> Scenario:
    """
    Raises:
        ConfigError: naming `where` and the first field that does not fit.
    """
    try:
        return Scenario.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "file"
        raise ConfigError(where, f"is no scenario: {field}: {first['msg']}") from error
