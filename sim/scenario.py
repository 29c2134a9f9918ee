"""A simulation as a file: trace, model, cluster and policies to compare."""

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ballast.common.errors import ConfigError
from sim.faults import FaultKind


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Burst(_Section):
    at_s: float = Field(ge=0)
    for_s: float = Field(gt=0)
    factor: float = Field(gt=0)  # of the rate


class Arrivals(_Section):
    """Synthetic arrivals, without a trace."""

    span_s: float = Field(gt=0)
    rate_per_s: float = Field(gt=0)  # outside of bursts
    cv: float = Field(1.0, gt=0)  # coefficient of variation of intervals; 1: a Poisson process
    bursts: tuple[Burst, ...] = ()


class RepeatedBurst(_Section):
    """The densest window is repeated, with nothing after it."""

    window_s: float = Field(gt=0)
    times: int = Field(ge=1)


class FaultPlan(_Section):
    """See sim.faults.Fault."""

    at_s: float = Field(ge=0)
    kind: FaultKind
    worker: int = Field(ge=0)
    duration_s: float | None = Field(None, gt=0)
    factor: float = Field(1.0, gt=0)


class Scenario(BaseModel):
    """Unknown keys are errors. The caller may supply the trace, and override fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str
    source: str = ""  # the experiment it reproduces
    trace: str | None = None  # relative to the file; None: arrivals are drawn, or the caller supplies it
    arrivals: Arrivals | None = None
    repeat_burst: RepeatedBurst | None = None
    lengths: str | None = None  # a data set's name; None: the trace's lengths
    model: str
    cluster: str
    policies: tuple[str, ...] = ("recompute", "drop")
    rate_scale: float = Field(1.0, gt=0)
    burst_scale: float = Field(1.0, gt=0)  # factor of requests in the densest half minute
    network_gbps: float | None = Field(None, gt=0)  # of each GPU's card; None: the catalogue's
    time_scale: float = Field(1.0, gt=0)
    length_scale: float = Field(1.0, gt=0)
    answer_scale: float | None = Field(None, gt=0)  # of answers, instead of length_scale
    limit: int | None = Field(None, ge=1)
    seed: int = 0
    deadline_s: float = Field(3600.0, gt=0)
    block_size: int = Field(64, ge=1)
    max_num_seqs: int = Field(256, ge=1)
    tpot_target_s: float | None = Field(None, gt=0)
    max_num_batched_tokens: int = Field(2048, ge=1)
    stop_after_s: float | None = Field(None, gt=0)  # requests still running then have no ending
    faults: tuple[FaultPlan, ...] = ()
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
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"is not YAML: {error}") from error
    found = make_scenario(content, str(path))
    if found.trace is None:
        return found
    return found.model_copy(update={"trace": str(path.parent / found.trace)})


def make_scenario(content: object, where: str = "") -> Scenario:
    """
    Args:
        content: As YAML has it.
        where: The file it is from; empty: flags of the same names.

    Raises:
        ConfigError: naming `where` and the first field that does not fit; a misspelt one before one that is missing.
    """
    try:
        return Scenario.model_validate(content)
    except ValidationError as error:
        first = min(error.errors(), key=lambda one: one["type"] == "missing")
        field = ".".join(str(part) for part in first["loc"]) or "file"
        why = "unknown setting" if first["type"] == "extra_forbidden" else first["msg"]
        if not where:
            raise ConfigError(f"--{field.replace('_', '-')}", f"{why} (got {first['input']!r})") from error
        raise ConfigError(f"{where}: {field}", why) from error
