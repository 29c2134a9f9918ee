"""Reads facts about a checkpoint from config.json and the headers of its weight files; loads no tensor."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ballast.common.errors import ConfigError
from ballast.common.units import human_bytes
from tools.model.safetensors_file import DTYPE_NAMES, DTYPES, TensorHeader, read_header

_OLD_NAMES = {  # names of GPT-2 and its successors
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
}
_KV_DTYPES = ("float32", "bfloat16", "float64", "fp8_e4m3")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    path: Path
    architecture: str
    dtype: str  # as in config.json; if that has none, the dtype of most tensors
    layer_count: int
    hidden_size: int
    head_count: int
    kv_head_count: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    tied: bool
    parameter_count: int
    is_quantised: bool = False  # if True, `parameter_count` is the number of stored (packed) elements
    bytes_per_dtype: dict[str, int]  # dtype (float32, bfloat16 ...) -> bytes of its tensors
    shard_count: int
    has_tokenizer: bool
    has_chat_template: bool

    @property
    def parameter_bytes(self) -> int:
        return sum(self.bytes_per_dtype.values())

    def rank_parameter_bytes(self, rank_count: int) -> int:
        """Bytes of one rank's parameters: the whole embedding and head, and the rank's share of all others."""
        whole = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        shared = self.parameter_count - whole
        return -(-self.parameter_bytes * (whole * rank_count + shared) // (self.parameter_count * rank_count))

    def kv_bytes_per_token(self, dtype: str | None = None) -> int:
        """KV bytes of one token over all layers, stored in `dtype` (default: the checkpoint's)."""
        element_bytes = 1 if dtype == "fp8_e4m3" else DTYPES[dtype or self.dtype][1]
        return 2 * self.layer_count * self.kv_head_count * self.head_dim * element_bytes

    def lines(self) -> list[tuple[str, str]]:
        """(label, value) pairs to print."""
        stored = ", ".join(f"{human_bytes(size)} {dtype}" for dtype, size in sorted(self.bytes_per_dtype.items()))
        kv = ", ".join(f"{human_bytes(self.kv_bytes_per_token(dtype))} {dtype}" for dtype in _KV_DTYPES)
        tied = " (tied embedding)" if self.tied else ""
        tokenizer = "missing" if not self.has_tokenizer else "with chat template" if self.has_chat_template else "yes"
        return [
            ("path", str(self.path)),
            ("architecture", self.architecture),
            *([] if self.is_quantised else [("parameters", f"{self.parameter_count:,}{tied}")]),
            ("stored", f"{stored} in {self.shard_count} file{'s' if self.shard_count > 1 else ''}"),
            ("layers", f"{self.layer_count} x hidden {self.hidden_size}"),
            ("heads", f"{self.head_count} query, {self.kv_head_count} KV, dim {self.head_dim}"),
            ("vocabulary", f"{self.vocab_size:,}"),
            ("maximum length", f"{self.max_model_len:,} tokens"),
            ("KV per token", kv),
            ("tokenizer", tokenizer),
        ]


def read_info(path: Path) -> CheckpointInfo:
    """Read the facts about the checkpoint in folder `path`.

    Raises:
        ConfigError: a file is missing, truncated or invalid; the message names it.
    """
    config = _read_json(path / "config.json")
    tensors, shard_count = _read_headers(path)
    bytes_per_dtype: dict[str, int] = {}
    for header in tensors.values():
        name = DTYPE_NAMES.get(header.dtype, header.dtype)
        bytes_per_dtype[name] = bytes_per_dtype.get(name, 0) + header.size_bytes
    number = _Numbers(path / "config.json", config)
    heads = number("num_attention_heads")
    hidden = number("hidden_size")
    architectures = config.get("architectures")
    tokenizer_config = path / "tokenizer_config.json"
    has_template = (path / "chat_template.jinja").is_file() or (
        tokenizer_config.is_file() and "chat_template" in _read_json(tokenizer_config)
    )
    return CheckpointInfo(
        path=path,
        architecture=str(cast("list[object]", architectures)[0])
        if isinstance(architectures, list) and architectures
        else "unknown",
        dtype=_dtype(config, bytes_per_dtype),
        layer_count=number("num_hidden_layers"),
        hidden_size=hidden,
        head_count=heads,
        kv_head_count=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden // heads),
        vocab_size=number("vocab_size"),
        max_model_len=number("max_position_embeddings"),
        tied="lm_head.weight" not in tensors,
        parameter_count=sum(t.element_count for t in tensors.values()),
        is_quantised=config.get("quantization_config") is not None,
        bytes_per_dtype=bytes_per_dtype,
        shard_count=shard_count,
        has_tokenizer=(path / "tokenizer.json").is_file(),
        has_chat_template=has_template,
    )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Reads positive integers from config.json. Raises ConfigError, which names file and key."""

    path: Path
    config: dict[str, Any]

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key, self.config.get(_OLD_NAMES.get(key, key)))
        if value is None and default is not None:
            return default
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(str(self.path), f"{key} must be a whole number above 0, got {value!r}")
        return value


def _dtype(config: dict[str, Any], bytes_per_dtype: dict[str, int]) -> str:
    named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if named in DTYPES:
        return named
    stored = [name for name in bytes_per_dtype if name in DTYPES]
    return max(stored, key=lambda name: (bytes_per_dtype[name], name)) if stored else "float32"


def _read_headers(path: Path) -> tuple[dict[str, TensorHeader], int]:
    index_path = path / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(str(index_path), "has no weight_map")
        files = sorted({str(name) for name in cast("dict[str, object]", weight_map).values()})
    elif (path / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        raise ConfigError(str(path), "no model.safetensors and no model.safetensors.index.json; is it a checkpoint?")
    tensors: dict[str, TensorHeader] = {}
    for name in files:
        tensors |= read_header(path / name)
    return tensors, len(files)


def _read_json(path: Path) -> dict[str, Any]:  # Any: external JSON, checked key by key
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(str(path), "not found; name the folder of a Hugging Face checkpoint") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(str(path), "must be a JSON object")
    return cast("dict[str, Any]", value)
