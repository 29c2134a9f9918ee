"""The file written by `ballast profile`: costs of batches, links and memory for one model on one machine.

Does not import torch, because the simulator and the command line read profiles, too.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ballast.common.cost import KNEE_TOKENS, CostModel
from ballast.common.errors import ConfigError
from services.worker.policy.cost_fit import CostForm, ErrorSummary, StageCosts

VERSION = 1
_REMEDY = "make a new one with `ballast profile`"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProfileKey(_Strict):
    """The conditions under which a profile is valid. `device`: name of the processor."""

    architecture: str
    parameter_count: int
    layer_count: int
    kv_bytes_per_token: int
    dtype: str
    device: str
    torch: str
    threads: int
    kernels: str = "torch"


class Coefficients(_Strict):
    """A validated `CostModel`."""

    attention_s: float = Field(ge=0, allow_inf_nan=False)
    token_s: float = Field(ge=0, allow_inf_nan=False)
    chunk_s: float = Field(ge=0, allow_inf_nan=False)
    shared_s: float = Field(ge=0, allow_inf_nan=False)
    prefix_s: float = Field(ge=0, allow_inf_nan=False)
    many_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    beyond_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    knee_tokens: int = Field(default=KNEE_TOKENS, ge=1)

    @model_validator(mode="after")
    def _shared_is_part_of_a_chunk(self) -> "Coefficients":
        if self.shared_s > self.chunk_s:
            raise ValueError(f"shared_s ({self.shared_s:g}) is greater than chunk_s ({self.chunk_s:g})")
        return self

    @classmethod
    def of(cls, cost: CostModel) -> "Coefficients":
        return cls(
            attention_s=cost.attention_s,
            token_s=cost.token_s,
            chunk_s=cost.chunk_s,
            shared_s=cost.shared_s,
            prefix_s=cost.prefix_s,
            many_s=cost.many_s,
            beyond_s=cost.beyond_s,
            knee_tokens=cost.knee_tokens,
        )

    def cost(self) -> CostModel:
        return CostModel(**self.model_dump())


class Costs(_Strict):
    """`StageCosts` of the profile file: costs per layer, and those added by each step, by the first and by the last
    stage.
    """

    layer: Coefficients
    step: Coefficients
    first: Coefficients
    last: Coefficients

    @classmethod
    def of(cls, costs: StageCosts) -> "Costs":
        parts = {name: Coefficients.of(getattr(costs, name)) for name in cls.model_fields}
        return cls(**parts)

    def stages(self) -> StageCosts:
        return StageCosts(self.layer.cost(), self.step.cost(), self.first.cost(), self.last.cost())


class Errors(_Strict):
    """Relative errors, |predicted / measured - 1|, on held-out batches."""

    count: int
    mean: float
    p90: float
    max: float

    @classmethod
    def of(cls, errors: ErrorSummary) -> "Errors":
        return cls(count=errors.count, mean=errors.mean, p90=errors.p90, max=errors.max)


class HeldOut(_Strict):
    without_prefix: Errors
    with_prefix: Errors


class LinkCosts(_Strict):
    """Cost of a transfer between two processes on this machine, over the loopback device."""

    bandwidth_bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(gt=0)  # half a round trip of a small activation


class CopyCosts(_Strict):
    """Speed of copies between host memory and device memory; on a CPU both are in the same memory."""

    to_device_bytes_per_s: float = Field(gt=0)
    from_device_bytes_per_s: float = Field(gt=0)


class CostProfile(_Strict):
    """The contents of a profile file."""

    kind: Literal["ballast-cost-profile"] = "ballast-cost-profile"
    version: Literal[1] = VERSION
    created_at: str
    model: str  # name of the checkpoint folder, for readers
    clock: str  # how batches were timed
    key: ProfileKey
    costs: Costs
    sample_count: int  # measured batches from which the costs were fitted
    held_out: dict[CostForm, HeldOut]
    link: LinkCosts | None
    remap_s_per_gb: float | None = Field(ge=0)  # duration of remapping parameters to KV; None for a model of one layer
    copies: CopyCosts


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_profile(path: Path, profile: CostProfile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), f"cannot be written: {error.strerror}") from error


def read_profile(path: Path) -> CostProfile:
    """Read a profile. Raises ConfigError that names the file and the first invalid field."""
    try:
        return CostProfile.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"is no cost profile but a binary file; {_REMEDY}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise ConfigError(
            str(path), f"is no cost profile of version {VERSION}: {where}: {first['msg']}; {_REMEDY}"
        ) from error


def read_matching(path: Path, key: ProfileKey) -> CostProfile:
    """Read a profile. Raises ConfigError if it was made for another model, machine or version of torch."""
    profile = read_profile(path)
    differing = [
        f"{name} is {getattr(profile.key, name)} there but {getattr(key, name)} here"
        for name in ProfileKey.model_fields
        if getattr(profile.key, name) != getattr(key, name)
    ]
    if differing:
        raise ConfigError(str(path), f"is a profile for other conditions: {'; '.join(differing)}; {_REMEDY}")
    return profile
