"""GPUs, models and timings, read from `catalogue/`, which documents the source of each figure."""

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ballast.common.errors import ConfigError

ELEMENT_BYTES = 2  # bf16: activations and everything that is not quantised
_SCALE_BYTES = 2 / 128  # per parameter: a 16-bit scale for each group of 128
QUANTIZATIONS = {  # bytes of a parameter in a layer
    "fp8": 1.0,
    "int8": 1.0,
    "w8a16": 1.0 + _SCALE_BYTES,
    "w4a16": 0.5 + _SCALE_BYTES,
    "mxfp4": 0.5 + 1 / 32,
}
Quantization = Literal["fp8", "int8", "w8a16", "w4a16", "mxfp4"]
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]  # the last two are the same


class _CatalogueEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Gpu(_CatalogueEntry):
    name: str
    memory_bytes: int = Field(gt=0)
    flops_per_s: float = Field(gt=0)
    fp8_flops_per_s: float | None = Field(default=None, gt=0)  # None: converted to bf16 and multiplied there
    int8_ops_per_s: float | None = Field(default=None, gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    scale_up_bytes_per_s: float = Field(gt=0)  # speed to another GPU of the same host, one direction
    nic_bytes_per_s: float = Field(gt=0)  # speed of the network card, both directions together
    host_bytes_per_s: float = Field(gt=0)  # speed of reads from host memory
    gpus_per_host: int = Field(ge=1)
    # Measured values, if known; None: those of timings.yaml
    layer_floor_s: float | None = Field(None, ge=0)
    collective_latency_s: float | None = Field(None, ge=0)
    collective_fraction: float | None = Field(None, gt=0, le=1)
    source: str

    def rate_of(self, quantization: Quantization | None) -> float:
        """Operations per second for parameters in this format. Those with 16-bit activations are multiplied in bf16."""
        rates = {"fp8": self.fp8_flops_per_s, "int8": self.int8_ops_per_s}
        return rates.get(quantization or "") or self.flops_per_s


class ModelSpec(_CatalogueEntry):
    name: str
    architecture: str
    parameter_count: int = Field(gt=0)
    other_parameter_count: int = Field(ge=0)  # embedding, head
    active_parameter_count: int | None = None  # None: all
    expert_parameter_count: int = 0
    experts_per_layer: int = 0
    experts_per_token: int = 0
    layer_count: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    attention_width: int = Field(ge=1)
    kv_elements_per_token_layer: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    max_model_len: int = Field(ge=2)
    gpus_per_instance: int = Field(ge=1)
    instance_parameter_bytes: int | None = None  # in bf16; None: one replica
    quantization: Quantization | None = None  # format of the layers' parameters; None: bf16
    kv_cache_dtype: KvCacheDtype = "auto"  # auto: bf16
    source: str

    @property
    def parameter_element_bytes(self) -> float:
        """Bytes of one parameter of a layer."""
        return ELEMENT_BYTES if self.quantization is None else QUANTIZATIONS[self.quantization]

    @property
    def kv_element_bytes(self) -> int:
        return ELEMENT_BYTES if self.kv_cache_dtype == "auto" else 1

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters of one instance."""
        dense = self.instance_parameter_bytes or self.parameter_count * ELEMENT_BYTES
        if self.quantization is None:
            return dense
        layers = (dense - self.other_parameter_bytes) / ELEMENT_BYTES
        return self.other_parameter_bytes + int(layers * self.parameter_element_bytes)

    @property
    def other_parameter_bytes(self) -> int:
        return self.other_parameter_count * ELEMENT_BYTES

    @property
    def layer_parameter_bytes(self) -> int:
        return (self.parameter_bytes - self.other_parameter_bytes) // self.layer_count

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of a token over all layers."""
        return self.kv_elements_per_token_layer * self.kv_element_bytes * self.layer_count


class Figure(_CatalogueEntry):
    value: float = Field(ge=0)
    source: str


class Timings(_CatalogueEntry):
    """Timing constants, documented in catalogue/timings.yaml."""

    compute_fraction: float
    attention_fraction: float
    weights_fraction: float
    bandwidth_fraction: float
    layer_floor_s: float
    row_passes: float
    step_overhead_s: float
    sequence_overhead_s: float
    collective_latency_s: float
    collective_fraction: float
    memory_fraction: float
    link_fraction: float
    link_latency_s: float
    link_connect_s: float
    chunk_bytes: float
    remap_s: float
    rpc_s: float
    state_s: float
    checksum_bytes_per_s: float  # 0: checksums take no time
    disk_bytes_per_s: float


class Cluster(_CatalogueEntry):
    gpu: Gpu
    gpu_count: int = Field(ge=1)
    gpus_per_host: int = Field(ge=1)
    others: tuple["Cluster", ...] = ()  # GPUs of other kinds, on hosts of their own

    @property
    def kinds(self) -> tuple["Cluster", ...]:
        return self.model_copy(update={"others": ()}), *self.others

    def instances_of(self, model: ModelSpec) -> int:
        return sum(kind.gpu_count // model.gpus_per_instance for kind in self.kinds)

    def require_one_kind(self, what: str) -> None:
        """Raise an error for clusters of several kinds of GPUs.

        Raises:
            ConfigError: there are several; the message names `what` as requiring one kind.
        """
        if self.others:
            raise ConfigError("cluster", f"{what} takes GPUs of one kind, got {self.gpu_name}")

    @property
    def gpu_name(self) -> str:
        return " + ".join(kind.gpu.name for kind in self.kinds)


def _read(name: str) -> Any:  # Any: YAML; validated by the caller
    return yaml.safe_load((resources.files("sim") / "catalogue" / name).read_text(encoding="utf-8"))


@cache
def gpus() -> Mapping[str, Gpu]:
    return {gpu.name: gpu for gpu in map(Gpu.model_validate, _read("gpus.yaml"))}


@cache
def models() -> Mapping[str, ModelSpec]:
    return {spec.name: spec for spec in map(ModelSpec.model_validate, _read("models.yaml"))}


@cache
def timings() -> Timings:
    figures = {name: Figure.model_validate(figure).value for name, figure in _read("timings.yaml").items()}
    return Timings.model_validate(figures)


def find_model(name: str) -> ModelSpec:
    """Find a model, ignoring differences in spelling: qwen2.5-14b and Qwen-2.5-14B are the same.

    Raises:
        ConfigError: it is unknown; the message lists the known models.
    """
    return _find(models(), "model", name)


def find_gpu(name: str, what: str) -> Gpu:
    """The GPU of that name in the catalogue, or in a user's file (`is_gpu_file`).

    Raises:
        ConfigError: it is unknown; the message names `what` (a flag or field) and the known GPUs. Or the user's file is
            invalid.
    """
    if is_gpu_file(name):
        return read_gpu(Path(name))
    return _find(gpus(), what, name, " (or a file of your own, NAME.yaml: docs/gpus.md)")


def is_gpu_file(name: str) -> bool:
    return name.lower().endswith((".yaml", ".yml"))


def read_gpu(path: Path) -> Gpu:
    """Read one entry in the catalogue's format. `name` defaults to the file's name.

    Raises:
        ConfigError: a figure is misspelt, missing or invalid; the message names the file and the first one.
    """
    try:
        content: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(str(path), f"must be one GPU's figures, as {next(iter(gpus()))} has them in the catalogue")
    try:
        return Gpu.model_validate({"name": path.stem, "source": str(path), **content})
    except ValidationError as error:
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        why = "unknown figure" if first["type"] == "extra_forbidden" else first["msg"]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}", why) from error


def find_cluster(text: str) -> Cluster:
    """Parse a cluster. `8xA800`: eight GPUs; `2x8xH800`: two hosts with eight each; `8xmine.yaml`: GPUs described by a
    file; `4xA100-40G+2xH100-80G`: several kinds.

    Raises:
        ConfigError: a GPU is unknown; the message lists the known ones.
    """
    first, *others = [_kind_of_gpus(part) for part in text.split("+")]
    return first.model_copy(update={"others": tuple(others)})


def _kind_of_gpus(text: str) -> Cluster:
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(.+)", text.strip())
    if match is None:
        raise ConfigError("cluster", f"must be like 8xA800 (GPUs) or 2x8xH800 (servers x GPUs each), got {text!r}")
    hosts, count, name = match.groups()
    gpu = find_gpu(name, "cluster")
    per_host = int(count) if hosts else gpu.gpus_per_host
    total = int(count) * int(hosts or 1)
    if total < 1:
        raise ConfigError("cluster", f"has no GPU: {text!r}")
    return Cluster(gpu=gpu, gpu_count=total, gpus_per_host=per_host)


_T = TypeVar("_T")


def _find(known: Mapping[str, _T], field: str, name: str, otherwise: str = "") -> _T:
    wanted = _plain(name)
    exact = [entry for entry_name, entry in known.items() if _plain(entry_name) == wanted]
    begun = exact or [entry for entry_name, entry in known.items() if wanted and wanted in _plain(entry_name)]
    if len(begun) != 1:
        what = "is not unique" if begun else "is not known"
        raise ConfigError(field, f"{name!r} {what}; known are {', '.join(sorted(known))}{otherwise}")
    return begun[0]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
