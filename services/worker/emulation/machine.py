"""What an emulated worker has to know: the outline of a model, and what a machine takes for its parts.

Either a file that `ballast up --engine emulated` makes of the catalogue, or one from `ballast profile` together with
the checkpoint's config.json.
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
    """A model's sizes. Layers are all alike."""

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
    """From a data sheet."""

    kind: Literal["roofline"] = "roofline"
    costs: RooflineCosts
    balance: CostModel  # of the whole model, fitted to that: what microbatches are formed by

    def stage_s(self, parts: Sequence[Part], layer_count: int, *, is_first: bool, is_last: bool) -> float:
        return self.costs.work(parts).on(layer_count, is_last=is_last)

    def cost_of(self, layer_count: int, *, is_first: bool, is_last: bool) -> CostModel:
        """Balance asks for ratios, so it serves for stages of any size."""
        return self.balance


class Measured(_Strict):
    """From `ballast profile`: see `policy.cost_fit.StageCosts`."""

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
    """One instance's devices, together."""

    kind: Literal["ballast-emulated-machine"] = "ballast-emulated-machine"
    version: Literal[1] = VERSION
    name: str  # for people
    model: Outline
    memory_bytes: int = Field(ge=1)  # for parameters and KV, unless the worker is told otherwise
    execution: Roofline | Measured = Field(discriminator="kind")
    link_bytes_per_s: float = Field(gt=0)  # of the network cards, for what comes and goes together
    disk_bytes_per_s: float = Field(gt=0)
    host_bytes_per_s: float = Field(default=24e9, gt=0)  # between host memory and the devices
    remap_s_per_byte: float = Field(ge=0)


def read_machine(path: Path) -> Machine:
    """
    Raises:
        ConfigError: naming the file, and the first field that does not fit.
    """
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
