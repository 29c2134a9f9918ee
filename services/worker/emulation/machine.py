"""The machine of an emulated worker: a model's sizes, and durations of operations.

Read from a file that `ballast up --engine emulated` makes from the catalogue, or from one of `ballast profile` with the
checkpoint's config.json.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ballast.common.cost import Chunk, CostModel
from ballast.common.errors import ConfigError
from services.worker.policy.roofline import Part, RooflineCosts

VERSION = 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Outline(_Strict):
    """A model's sizes. All layers are equal."""

    name: str
    architecture: str
    parameter_count: int = Field(ge=1)
    layer_count: int = Field(ge=1)
    layer_parameter_bytes: int = Field(ge=1)
    other_parameter_bytes: int = Field(ge=1)  # embedding, head
    kv_elements_per_token_layer: int = Field(ge=2, multiple_of=2)
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=3)
    max_model_len: int = Field(ge=2)
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "bfloat16"


class Roofline(_Strict):
    """Durations derived from a data sheet."""

    kind: Literal["roofline"] = "roofline"
    costs: RooflineCosts
    balance: CostModel  # cost model of the whole model fitted to it, for microbatches

    def stage_s(self, parts: Sequence[Part], layer_count: int, *, is_first: bool, is_last: bool) -> float:
        return self.costs.work(parts).on(layer_count, is_last=is_last)

    def cost_of(self, layer_count: int, *, is_first: bool, is_last: bool) -> CostModel:
        """The cost model of the whole model, for any stage: balancing microbatches needs ratios only."""
        return self.balance


class MeasuredCosts(_Strict):
    """Durations measured by `ballast profile`: see `policy.cost_fit.StageCosts`."""

    kind: Literal["measured"] = "measured"
    layer: CostModel
    step: CostModel
    first: CostModel
    last: CostModel

    def stage_s(self, parts: Sequence[Part], layer_count: int, *, is_first: bool, is_last: bool) -> float:
        cost = self.cost_of(layer_count, is_first=is_first, is_last=is_last)
        return cost.batch_cost_s(Chunk(part.first_position, len(part.token_ids)) for part in parts)

    def cost_of(self, layer_count: int, *, is_first: bool, is_last: bool) -> CostModel:
        cost = self.layer.scaled(layer_count).plus(self.step)
        if is_first:
            cost = cost.plus(self.first)
        return cost.plus(self.last) if is_last else cost


class Machine(_Strict):
    """All devices of one instance."""

    kind: Literal["ballast-emulated-machine"] = "ballast-emulated-machine"
    version: Literal[1] = VERSION
    name: str  # name shown to people
    model: Outline
    memory_bytes: int = Field(ge=1)  # memory for parameters and KV, unless configured otherwise
    gpu_memory_bytes: int = Field(default=0, ge=0)  # of one GPU, which determines limits per step; 0: unknown
    execution: Roofline | MeasuredCosts = Field(discriminator="kind")
    link_bytes_per_s: float = Field(gt=0)  # speed of the network cards, both directions together
    disk_bytes_per_s: float = Field(gt=0)
    host_bytes_per_s: float = Field(default=24e9, gt=0)  # copy speed between host memory and the devices
    remap_s_per_byte: float = Field(ge=0)


def read_machine(path: Path) -> Machine:
    """Read a machine's file. Raises ConfigError, which names the file and the first invalid field."""
    try:
        return Machine.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, ValidationError) as error:
        raise ConfigError(str(path), f"describes no emulated machine: {_first(error)}") from error


def write_machine(path: Path, machine: Machine) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(machine.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), f"cannot be written: {error.strerror}") from error
    return path


def _first(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return "a binary file"
    first: Any = error.errors()[0]  # Any: pydantic's own dictionary
    where = ".".join(str(part) for part in first["loc"]) or "file"
    return f"{where}: {first['msg']}"
