"""config.json of a Hugging Face checkpoint, reduced to what the forward pass needs.

Missing keys get the defaults of the architecture's configuration class, on which checkpoints rely.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from ballast.common.errors import ConfigError
from ballast.rpc.border import MAX_LAYERS

Json = Mapping[str, object]


class RopeKind(StrEnum):
    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"  # equals default up to max_position_embeddings, the longest length served
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0  # this and the following fields are for llama3 only
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model that do not depend on the implementation."""

    architecture: str
    vocab_size: int
    layer_count: int
    max_position: int  # longest sequence, prompt and output together
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str | None  # dtype named in config.json
    rank: int = 0
    rank_count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelFacts):
    """Configuration of a model; with tensor parallelism, heads and the MLP's inner size are per rank."""

    hidden_size: int
    intermediate_size: int
    head_count: int
    kv_head_count: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool

    def of_rank(self, rank: int, rank_count: int) -> "ModelConfig":
        """Configuration of one rank, with its share of the heads, KV heads and MLP.

        Raises:
            ConfigError: they are not divisible by the number of ranks.
        """
        shares = {
            "attention heads": self.head_count,
            "KV heads": self.kv_head_count,
            "rows of the MLP": self.intermediate_size,
        }
        for name, count in shares.items():
            if count % rank_count:
                raise ConfigError("tensor_parallel_size", f"{rank_count} does not divide the model's {count} {name}")
        head_count, kv_head_count, inner = (count // rank_count for count in shares.values())
        return replace(
            self,
            head_count=head_count,
            kv_head_count=kv_head_count,
            intermediate_size=inner,
            rank=rank,
            rank_count=rank_count,
        )

    @property
    def query_size(self) -> int:
        return self.head_count * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_head_count * self.head_dim


@dataclass(frozen=True, slots=True)
class _Family:
    """Properties that an architecture implies and config.json may omit."""

    kv_head_count: int | None  # None: same as query heads
    head_dim: int | None  # None: hidden / heads
    default_window: int | None
    max_position: int
    qkv_bias: bool | None  # None: attention_bias in config.json decides
    output_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool


_FAMILIES = {
    "LlamaForCausalLM": _Family(None, None, None, 2048, None, None, None, qk_norm=False),
    "MistralForCausalLM": _Family(8, None, 4096, 131072, False, False, False, qk_norm=False),
    "Qwen2ForCausalLM": _Family(32, None, 4096, 32768, True, False, False, qk_norm=False),
    "Qwen3ForCausalLM": _Family(32, 128, 4096, 32768, None, None, False, qk_norm=True),
}


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read config.json and, if present, generation_config.json.

    Raises:
        ConfigError: the checkpoint cannot be served exactly; the message names file and key.
    """
    path = model_dir / "config.json"
    config = _Reader(path, read_json(path))
    architecture = _architecture(config)
    family = _FAMILIES[architecture]
    hidden_size, head_count = config.count("hidden_size"), config.count("num_attention_heads")
    kv_head_count = config.count("num_key_value_heads", family.kv_head_count or head_count)
    if head_count % kv_head_count:
        raise config.error("num_attention_heads", f"{head_count} is not a multiple of {kv_head_count} KV heads")
    head_dim = config.count("head_dim", family.head_dim or hidden_size // head_count)
    if head_dim % 2:
        raise config.error("head_dim", f"must be even for the rotary embedding, got {head_dim}")
    if (activation := config.text("hidden_act", "silu")) != "silu":
        raise config.error("hidden_act", f"{activation!r} is not supported, only 'silu'")
    attention_bias = config.flag("attention_bias", default=False)
    max_position = config.count("max_position_embeddings", family.max_position)
    window = _sliding_window(config, family)
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        layer_count=_layer_count(config),
        head_count=head_count,
        kv_head_count=kv_head_count,
        head_dim=head_dim,
        # Up to the window's length, windowed attention equals full attention.
        max_position=max_position if window is None else min(max_position, window),
        rms_norm_eps=config.positive("rms_norm_eps", 1e-6),
        rope=_rope(config, max_position),
        tied_embeddings=config.flag("tie_word_embeddings", default=False),
        has_qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        has_output_bias=attention_bias if family.output_bias is None else family.output_bias,
        has_mlp_bias=config.flag("mlp_bias", default=False) if family.mlp_bias is None else family.mlp_bias,
        has_qk_norm=family.qk_norm,
        eos_token_ids=_eos_token_ids(model_dir, config),
        checkpoint_dtype=config.optional_text("dtype") or config.optional_text("torch_dtype"),
    )


def read_eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """End-of-sequence ids from generation_config.json or, without it, config.json. Errors as in `read_model_config`."""
    path = model_dir / "config.json"
    return _eos_token_ids(model_dir, _Reader(path, read_json(path)))


def read_json(path: Path) -> Json:
    """Read a JSON object from a file.

    Raises:
        ConfigError: the file does not exist, is not JSON or contains no object.
    """
    try:
        value: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(str(path), "no such file; is this the folder of a Hugging Face checkpoint?") from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(str(path), f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(str(path), f"must hold a JSON object, holds a {type(value).__name__}")
    return cast(Json, value)


class _Reader:
    """Typed access to the keys of a JSON object; errors name file and key."""

    def __init__(self, path: Path, values: Json, prefix: str = "") -> None:
        self._path, self._values, self._prefix = path, values, prefix

    def error(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"{self._path}: {self._prefix}{key}", why)

    def get(self, key: str) -> object:
        return self._values.get(key)

    def has(self, key: str) -> bool:
        return key in self._values

    def section(self, key: str) -> "_Reader | None":
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, got {value!r}")
        return _Reader(self._path, cast(Json, value), f"{self._prefix}{key}.")

    def count(self, key: str, default: int | None = None) -> int:
        value = self._required(key, default)
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, f"must be a whole number of at least 1, got {value!r}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self._required(key, default)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(key, f"must be a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return value

    def optional_text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, f"must be a string, got {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        return self.optional_text(key) or default

    def _required(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value


def _architecture(config: _Reader) -> str:
    value = config.get("architectures")
    names = cast(list[object], value) if isinstance(value, list) else []
    if len(names) != 1 or names[0] not in _FAMILIES:
        supported = ", ".join(_FAMILIES)
        raise config.error("architectures", f"{value!r} is not supported; supported are {supported}")
    if config.get("quantization_config") is not None:
        raise config.error("quantization_config", "our own classes compute no quantised checkpoints")
    return str(names[0])


def _layer_count(config: _Reader) -> int:
    count = config.count("num_hidden_layers")
    if count > MAX_LAYERS:
        raise config.error("num_hidden_layers", f"at most {MAX_LAYERS} are supported, got {count}")
    return count


def _sliding_window(config: _Reader, family: _Family) -> int | None:
    if family.default_window is None:
        return None
    switched = config.get("use_sliding_window")
    if family.qkv_bias is False:  # Mistral has no switch for its window: a window that is set is used
        if config.has("sliding_window") and config.get("sliding_window") is None:
            return None
    elif not switched:
        return None
    return config.count("sliding_window", family.default_window)


def _rope(config: _Reader, max_position: int) -> RopeConfig:
    section = config.section("rope_parameters") or config.section("rope_scaling")
    theta = config.positive("rope_theta", 10_000.0)
    if section is None:
        return RopeConfig(kind=RopeKind.DEFAULT, theta=theta)
    theta = section.positive("rope_theta", theta)
    name = section.text("rope_type", section.text("type", "default"))
    if name not in tuple(RopeKind):
        supported = ", ".join(RopeKind)
        raise section.error("rope_type", f"{name!r} is not supported; supported are {supported}")
    if section.positive("partial_rotary_factor", 1.0) != 1.0:
        raise section.error("partial_rotary_factor", "rotating only a part of each head is not supported")
    kind = RopeKind(name)
    if kind in (RopeKind.DEFAULT, RopeKind.DYNAMIC):
        return RopeConfig(kind=kind, theta=theta)
    if kind is RopeKind.LINEAR:
        return RopeConfig(kind=kind, theta=theta, factor=section.positive("factor"))
    low, high = section.positive("low_freq_factor"), section.positive("high_freq_factor")
    if low >= high:
        raise section.error("low_freq_factor", f"{low} must be less than high_freq_factor, {high}")
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=section.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=section.count("original_max_position_embeddings", max_position),
    )


def _eos_token_ids(model_dir: Path, config: _Reader) -> tuple[int, ...]:
    path = model_dir / "generation_config.json"
    reader, value = config, config.get("eos_token_id")
    if path.exists():
        generation = _Reader(path, read_json(path))
        if generation.get("eos_token_id") is not None:
            reader, value = generation, generation.get("eos_token_id")
    if value is None:
        return ()
    listed = cast(list[object], value) if isinstance(value, list) else [value]
    ids: list[int] = []
    for item in listed:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise reader.error("eos_token_id", f"must be a token id or a list of token ids, got {value!r}")
        ids.append(item)
    return tuple(dict.fromkeys(ids))


def longest_of(config: Any) -> int | None:
    """Maximum sequence length; None: the configuration has none. With longrope, the length up to which a sequence's
    rotation does not depend on the longest sequence of its batch.
    """
    longest = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    sections = [rope, *(section for section in rope.values() if isinstance(section, dict))]
    for section in sections:
        if section.get("rope_type") == "longrope" and longest is not None:
            longest = min(longest, section.get("original_max_position_embeddings") or longest)
    return longest
