"""A simulation described by a file: trace, model, cluster and policies to compare."""

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ballast.common.errors import ConfigError
from sim.faults import FaultKind
from sim.hardware import KvCacheDtype, Quantization


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Burst(_Section):
    at_s: float = Field(ge=0)
    for_s: float = Field(gt=0)
    factor: float = Field(gt=0)  # factor on the rate


class Arrivals(_Section):
    """Synthetic arrivals, without a trace."""

    span_s: float = Field(gt=0)
    rate_per_s: float = Field(gt=0)  # rate outside bursts
    cv: float = Field(1.0, gt=0)  # coefficient of variation of intervals; 1: Poisson process
    bursts: tuple[Burst, ...] = ()
    on_s: float | None = Field(None, gt=0)  # requests arrive for this long, then none for `off_s`; None: always
    off_s: float = Field(0.0, ge=0)


class Offline(_Section):
    """Endless offline work in addition to the trace, until the trace's last arrival."""

    lengths: str  # name of a data set, or a file
    waiting_count: int = Field(8, ge=1)  # requests that wait at each dispatcher
    as_class: Literal["batch", "default"] = "batch"  # default: engines have only priorities; the trace is interactive


class RepeatedBurst(_Section):
    """Repeats the densest window, and ends the trace after it."""

    window_s: float = Field(gt=0)
    times: int = Field(ge=1)


class FaultPlan(_Section):
    """A fault; see sim.faults.Fault."""

    at_s: float = Field(ge=0)
    kind: FaultKind
    worker: int = Field(ge=0)
    duration_s: float | None = Field(None, gt=0)
    factor: float = Field(1.0, gt=0)


class Scenario(BaseModel):
    """A scenario. Unknown keys are errors. The caller may supply the trace and override fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str
    source: str = ""  # the experiment that it reproduces
    trace: str | None = None  # relative to the file; None: arrivals are generated, or the caller supplies it
    arrivals: Arrivals | None = None
    repeat_burst: RepeatedBurst | None = None
    lengths: str | None = None  # name of a data set; None: the trace's lengths
    model: str
    quantization: Quantization | None = None  # of the layers' parameters; None: as the model's config.json says
    kv_cache_dtype: KvCacheDtype = "auto"  # auto: bfloat16
    cluster: str
    policies: tuple[str, ...] = ("recompute", "drop")
    rate_scale: float = Field(1.0, gt=0)
    burst_scale: float = Field(1.0, gt=0)  # factor on requests in the busiest half minute
    network_gbps: float | None = Field(None, gt=0)  # speed of each GPU's network card; None: the catalogue's
    time_scale: float = Field(1.0, gt=0)
    length_scale: float = Field(1.0, gt=0)
    answer_scale: float | None = Field(None, gt=0)  # scale of answers, instead of length_scale
    limit: int | None = Field(None, ge=1)
    seed: int = 0
    deadline_s: float = Field(3600.0, gt=0)
    block_size: int = Field(64, ge=1)
    max_num_seqs: int | None = Field(None, ge=1)  # None: the worker's default on the smallest of the GPUs
    tpot_target_s: float | None = Field(None, gt=0)
    max_num_batched_tokens: int | None = Field(None, ge=1)  # None: likewise
    stop_after_s: float | None = Field(None, gt=0)  # requests still running then have no outcome
    faults: tuple[FaultPlan, ...] = ()
    offline: Offline | None = None
    microbatching: Literal["lookahead", "token-count"] = "lookahead"


def read_scenario(path: Path) -> Scenario:
    """Read a scenario.

    Raises:
        ConfigError: a field is invalid; the message names the file and the first one.
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
    """Validate a scenario.

    Args:
        content: Parsed YAML.
        where: The file; empty: flags of the same names.

    Raises:
        ConfigError: a field is invalid; the message names `where` and the first one, misspelt names before missing
            ones.
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
