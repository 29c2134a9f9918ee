"""LoRA adapter folders as `peft` writes them, read without loading tensors. Does not import torch.

Every key of `adapter_config.json` that would change the computation is either supported or rejected by name.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from ballast.common.errors import ConfigError
from ballast.common.sampling import MAX_ADAPTER_CHARS
from services.worker.engine.model_config import ModelConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Linears = Mapping[str, tuple[int, int]]  # linear modules in a model's layers: name -> (outputs, inputs)

_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_FOLLOWED = {"peft_type", "r", "lora_alpha", "use_rslora"}
# Keys that concern only training, or that repeat facts of the tensors.
_SAYING_NOTHING = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
_BASE_CHANGED_BY = ("pissa", "olora", "corda", "loftq")  # initialisations that modify the base weights


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """One adapter's folder.

    Attributes:
        name: Its name in requests.
        scale: Factor of its products.
        ranks: Rank by name of modified module.
        sizes: Outputs and inputs by name of modified module.
        revision: Digest of its files.
    """

    name: str
    folder: Path
    scale: float
    ranks: Mapping[str, int]
    sizes: Linears
    revision: str

    @property
    def rank(self) -> int:
        return max(self.ranks.values())

    def element_count(self, rank_count: int = 1) -> int:
        """Number of elements of the tensors on each of `rank_count` ranks; see `divides_inputs`."""
        count = 0
        for module, (outputs, inputs) in self.sizes.items():
            whole, divided = (outputs, inputs) if divides_inputs(module) else (inputs, outputs)
            count += self.ranks[module] * (whole + divided // rank_count)
        return count

    def key(self, module: str, which: str) -> str:
        """Name of the tensor; `which` is A or B."""
        return f"base_model.model.{module}.lora_{which}.weight"


def divides_inputs(module: str) -> bool:
    """True if tensor-parallel ranks divide the module's inputs (attention output, MLP down); False if they divide its
    outputs.
    """
    return module.rpartition(".")[2] in ("o_proj", "down_proj")


def own_linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Linear modules of models with our own classes."""
    hidden, inner = config.hidden_size, config.intermediate_size
    sizes = {
        "self_attn.q_proj": (config.query_size, hidden),
        "self_attn.k_proj": (config.kv_size, hidden),
        "self_attn.v_proj": (config.kv_size, hidden),
        "self_attn.o_proj": (hidden, config.query_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"model.layers.{i}.{name}": size for i in range(config.layer_count) for name, size in sizes.items()}


def read_adapters(modules: Mapping[str, Path], linears: Linears | None) -> list[AdapterFiles]:
    """The adapters of `--lora-modules`, sorted by name. `linears` None: the modified modules are not validated.

    Raises:
        ConfigError: an adapter cannot be served with this model; the message says which, and why.
    """
    return [_read(name, modules[name], linears) for name in sorted(modules)]


def _read(name: str, folder: Path, linears: Linears | None) -> AdapterFiles:
    if not 1 <= len(name) <= MAX_ADAPTER_CHARS or not name.isprintable():
        raise ConfigError("lora_modules", f"{name!r} is not a valid name: use 1 to {MAX_ADAPTER_CHARS} characters")
    told, text = _read_config(folder / CONFIG)
    rank = told.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"{folder / CONFIG}: r", f"must be a whole number above 0, got {rank!r}")
    alpha = told.get("lora_alpha", rank)
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ConfigError(f"{folder / CONFIG}: lora_alpha", f"must be a number, got {alpha!r}")
    shapes = _read_shapes(folder / WEIGHTS)
    ranks = {module: _rank_of(folder / WEIGHTS, module, pair, rank, linears) for module, pair in shapes.items()}
    return AdapterFiles(
        name=name,
        folder=folder,
        scale=alpha / (math.sqrt(rank) if told.get("use_rslora") else rank),
        ranks=ranks,
        sizes={module: (pair["B"][0], pair["A"][1]) for module, pair in shapes.items()},
        revision=_digest(text, folder / WEIGHTS),
    )


def _read_config(path: Path) -> tuple[dict[str, Any], bytes]:
    try:
        text = path.read_bytes()
        told: object = json.loads(text)
    except OSError as error:
        why = f"cannot be read: {error.strerror}; a LoRA adapter is a folder with {CONFIG} and {WEIGHTS}"
        raise ConfigError(str(path), why) from error
    except ValueError as error:
        raise ConfigError(str(path), f"is not valid JSON: {error}") from error
    if not isinstance(told, dict) or cast(dict[str, Any], told).get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type", "must be LORA: other kinds of adapters are not served")
    for key, value in cast(dict[str, Any], told).items():
        if key == "bias" and value == "none":
            continue
        if key == "init_lora_weights":
            if str(value).lower().startswith(_BASE_CHANGED_BY):
                why = f"{value} changes the model's own weights; convert the adapter to plain LoRA with peft"
                raise ConfigError(f"{path}: {key}", why)
        elif value and key not in _FOLLOWED | _SAYING_NOTHING:
            raise ConfigError(f"{path}: {key}", f"{value!r} is not supported by Ballast's LoRA")
    return cast(dict[str, Any], told), text


def _read_shapes(path: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of the matrices "A" and "B" by module name.

    Raises:
        ConfigError: the file has no tensors, cannot be read, or has a tensor that is not supported.
    """
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    try:
        with safe_open(path, framework="numpy") as opened:  # pyright: ignore[reportUnknownVariableType] - no types
            for key in cast(list[str], opened.keys()):
                match = _KEY.fullmatch(key)
                if match is None or ".experts." in key:
                    why = "is not supported: matrices lora_A and lora_B of a layer's linear modules are"
                    raise ConfigError(f"{path}: {key}", why)
                shape = tuple(cast(list[int], opened.get_slice(key).get_shape()))
                found.setdefault(match[1], {})[match[2]] = shape
    except (SafetensorError, OSError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from error
    if not found:
        raise ConfigError(str(path), "has no tensors")
    return found


def _rank_of(path: Path, module: str, pair: Mapping[str, tuple[int, ...]], rank: int, linears: Linears | None) -> int:
    if set(pair) != {"A", "B"} or any(len(shape) != 2 for shape in pair.values()):
        raise ConfigError(f"{path}: {module}", f"needs two matrices, lora_A and lora_B, and has {dict(pair)}")
    (inner, inputs), (outputs, also_inner) = pair["A"], pair["B"]
    if inner != rank or also_inner != rank:
        raise ConfigError(f"{path}: {module}", f"has rank {inner} and {also_inner}, {CONFIG} says r = {rank}")
    if linears is not None:
        if module not in linears:
            why = "is no linear module of this model's layers: attention and MLP can be adapted"
            raise ConfigError(f"{path}: {module}", f"{why}, embeddings and head cannot")
        if linears[module] != (outputs, inputs):
            wanted = "{} outputs and {} inputs".format(*linears[module])
            why = f"is made for {outputs} outputs and {inputs} inputs, this model has {wanted}: is it of another model?"
            raise ConfigError(f"{path}: {module}", why)
    return inner


def _digest(config: bytes, weights: Path) -> str:
    digest = hashlib.sha256(config)
    with weights.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()[:16]
