"""Makes small random checkpoints in the published format of each supported architecture.

`transformers` and Ballast's engine can both load them; they are the models of tests, demo and benchmarks.
The weights are random but scaled so that greedy decoding is a useful test: attention is sharp and strong enough that
the next token depends on the whole context, and logits are spread so widely that the best two are rarely closer than
rounding errors. Norm weights and biases differ from their neutral values, so that omitting one changes the tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ballast.common.errors import ConfigError
from tools.model.safetensors_file import DTYPES, write_safetensors
from tools.model.tokenizer import BOS_ID, EOS_ID, PAD_ID, TURN_END_ID, write_tokenizer

Array = NDArray[np.floating[Any]]

_ATTENTION_GAIN = 1.7  # gain of queries and keys; the standard deviation of attention scores is about its square
_VALUE_GAIN = 1.5
_MLP_GAIN = 1.5
_LOGIT_STD = 4.0
_NORM_STD = 0.1
_BIAS_STD = 0.2
_TIED_GAIN = 2.0  # gain of the blocks' output with a tied embedding; without it, each token would predict itself


@dataclass(frozen=True, slots=True)
class Architecture:
    """The differences between families of models: names, biases, norms and published constants."""

    class_name: str
    model_type: str
    rms_norm_eps: float
    rope_theta: float
    qwen: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = False


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", 1e-5, 10_000.0),
    "llama3": Architecture("LlamaForCausalLM", "llama", 1e-5, 500_000.0),
    "mistral": Architecture("MistralForCausalLM", "mistral", 1e-5, 1_000_000.0),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", 1e-6, 1_000_000.0, qwen=True, has_qkv_bias=True),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", 1e-6, 1_000_000.0, qwen=True, has_qk_norm=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyShape:
    """Sizes of a checkpoint. Defaults: `head_dim` is hidden / heads, `intermediate` about 8/3 of hidden."""

    hidden: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    intermediate: int | None = None
    vocab: int = 512
    max_len: int = 512
    tied: bool = False

    @property
    def head_size(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden // self.heads

    @property
    def intermediate_size(self) -> int:
        return self.intermediate if self.intermediate is not None else -(-self.hidden * 8 // 3 // 16) * 16

    def check(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_size", "intermediate_size", "vocab", "max_len"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, got {getattr(self, name)}")
        if self.head_dim is None and self.hidden % self.heads:
            raise ConfigError("hidden", f"{self.hidden} is not a multiple of {self.heads} heads; give head_dim")
        if self.heads % self.kv_heads:
            raise ConfigError("heads", f"{self.heads} is not a multiple of {self.kv_heads} KV heads")
        if self.head_size % 2:
            raise ConfigError("head_dim", f"must be even for rotary embedding, got {self.head_size}")


PRESETS = {
    "tiny": TinyShape(),
    # Two workers and the other services run it on two cores; KV runs out before compute.
    "demo": TinyShape(hidden=128, layers=4, heads=8, kv_heads=4, vocab=1024, max_len=2048),
    # The parameters are several times as large as the KV of the requests that the demo runs at a time.
    "ballast": TinyShape(hidden=384, layers=8, heads=12, kv_heads=2, intermediate=1024, vocab=1024, max_len=1024),
    # Like `ballast` with about half the arithmetic, for more workers on the same cores.
    "ballast-half": TinyShape(hidden=256, layers=8, heads=8, kv_heads=1, intermediate=1024, vocab=1024, max_len=1024),
    # About 35 M parameters, for throughput measurements.
    "bench": TinyShape(
        hidden=512, layers=8, heads=8, kv_heads=4, intermediate=1792, vocab=8192, max_len=2048, tied=False
    ),
}


def make_tiny(
    arch: str,
    out: Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int | None = None,
    vocab: int = 512,
    max_len: int = 512,
    tied: bool = False,
    dtype: str = "float32",
    shards: int = 1,
) -> Path:
    """Write a random checkpoint to the folder `out` (created if needed, must be empty) and return it.

    The same arguments produce the same bytes.

    Raises:
        ConfigError: the arguments do not describe a valid model, or the folder is not empty.
    """
    shape = TinyShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        max_len=max_len,
        tied=tied,
    )
    return write_checkpoint(arch, out, shape, seed=seed, dtype=dtype, shards=shards)


def make_preset(
    preset: str, out: Path, *, arch: str = "llama", seed: int = 0, dtype: str = "float32", shards: int = 1
) -> Path:
    """The same as `make_tiny`, with the sizes of a preset: tiny, demo, ballast, ballast-half or bench."""
    if preset not in PRESETS:
        raise ConfigError("preset", f"unknown: {preset!r}; there are {', '.join(PRESETS)}")
    return write_checkpoint(arch, out, PRESETS[preset], seed=seed, dtype=dtype, shards=shards)


def write_checkpoint(
    arch: str, out: Path, shape: TinyShape, *, seed: int = 0, dtype: str = "float32", shards: int = 1
) -> Path:
    if arch not in ARCHITECTURES:
        raise ConfigError("arch", f"unknown: {arch!r}; there are {', '.join(ARCHITECTURES)}")
    if dtype not in DTYPES:
        raise ConfigError("dtype", f"unknown: {dtype!r}; there are {', '.join(DTYPES)}")
    if seed < 0:
        raise ConfigError("seed", f"must be at least 0, got {seed}")
    shape.check()
    architecture = ARCHITECTURES[arch]
    tensors = dict(_tensors(architecture, shape, np.random.default_rng(seed)))
    if not 1 <= shards <= len(tensors):
        raise ConfigError("shards", f"must be between 1 and {len(tensors)} (the number of tensors), got {shards}")
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ConfigError(str(out), "the folder is not empty; name a new one")
    _write_weights(out, tensors, dtype, shards)
    _write_json(out / "config.json", _config(arch, shape, dtype))
    _write_json(out / "generation_config.json", _generation_config())
    write_tokenizer(out, shape.vocab, qwen=architecture.qwen, max_len=shape.max_len)
    return out


def _tensors(arch: Architecture, shape: TinyShape, rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    """(name, value) of every parameter in the published order; names and shapes are those of `transformers`."""
    hidden, vocab = shape.hidden, shape.vocab

    def linear(out_size: int, in_size: int, gain: float) -> Array:
        return rng.standard_normal((out_size, in_size)) * (gain / in_size**0.5)

    def norm(size: int, mean: float = 1.0) -> Array:
        return mean + _NORM_STD * rng.standard_normal(size)

    embedding_std = _LOGIT_STD / hidden**0.5 if shape.tied else 1.0
    block_gain = _TIED_GAIN if shape.tied else 1.0
    yield "model.embed_tokens.weight", rng.standard_normal((vocab, hidden)) * embedding_std
    q_size, kv_size = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    for i in range(shape.layers):
        prefix = f"model.layers.{i}."
        yield prefix + "input_layernorm.weight", norm(hidden)
        for name, size, gain in (("q", q_size, _ATTENTION_GAIN), ("k", kv_size, _ATTENTION_GAIN), ("v", kv_size, 1.0)):
            yield f"{prefix}self_attn.{name}_proj.weight", linear(size, hidden, gain)
            if arch.has_qkv_bias:
                yield f"{prefix}self_attn.{name}_proj.bias", _BIAS_STD * rng.standard_normal(size)
        yield prefix + "self_attn.o_proj.weight", linear(hidden, q_size, _VALUE_GAIN * block_gain)
        if arch.has_qk_norm:
            yield prefix + "self_attn.q_norm.weight", norm(shape.head_size, _ATTENTION_GAIN)
            yield prefix + "self_attn.k_norm.weight", norm(shape.head_size, _ATTENTION_GAIN)
        yield prefix + "post_attention_layernorm.weight", norm(hidden)
        yield prefix + "mlp.gate_proj.weight", linear(shape.intermediate_size, hidden, 1.0)
        yield prefix + "mlp.up_proj.weight", linear(shape.intermediate_size, hidden, 1.0)
        yield prefix + "mlp.down_proj.weight", linear(hidden, shape.intermediate_size, _MLP_GAIN * block_gain)
    yield "model.norm.weight", norm(hidden)
    if not shape.tied:
        yield "lm_head.weight", linear(vocab, hidden, _LOGIT_STD)


def _write_weights(out: Path, tensors: dict[str, Array], dtype: str, shards: int) -> None:
    if shards == 1:
        write_safetensors(out / "model.safetensors", tensors, dtype)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}  # tensor -> file
    total_bytes = 0
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        total_bytes += write_safetensors(out / file_name, {name: tensors[name] for name in part}, dtype)
        weight_map |= dict.fromkeys(part, file_name)
    _write_json(
        out / "model.safetensors.index.json",
        {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))},
    )


def _config(arch_name: str, shape: TinyShape, dtype: str) -> dict[str, object]:
    arch = ARCHITECTURES[arch_name]
    config: dict[str, object] = {
        "architectures": [arch.class_name],
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_len,
        "model_type": arch.model_type,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": arch.rms_norm_eps,
        "rope_theta": arch.rope_theta,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": dtype,
        "transformers_version": "4.55.0",
        "use_cache": True,
        "vocab_size": shape.vocab,
    }
    if shape.head_dim is not None or arch_name == "qwen3":
        config["head_dim"] = shape.head_size
    return config | _family_config(arch_name, shape)


def _family_config(arch_name: str, shape: TinyShape) -> dict[str, object]:
    match arch_name:
        case "llama":
            return {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None}
        case "llama3":
            # Scaled to `max_len` so that short contexts use all three frequency bands of the scaling.
            scaling = {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": max(shape.max_len // 4, 8),
                "rope_type": "llama3",
            }
            return {
                "attention_bias": False,
                "eos_token_id": [EOS_ID, TURN_END_ID],
                "mlp_bias": False,
                "pretraining_tp": 1,
                "rope_scaling": scaling,
            }
        case "mistral":
            return {"sliding_window": None}
        case "qwen2":
            return {"max_window_layers": shape.layers, "sliding_window": None, "use_sliding_window": False}
        case _:  # qwen3
            return {
                "attention_bias": False,
                "max_window_layers": shape.layers,
                "rope_scaling": None,
                "sliding_window": None,
                "use_sliding_window": False,
            }


def _generation_config() -> dict[str, object]:
    return {
        "_from_model_config": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": [EOS_ID, TURN_END_ID],
        "pad_token_id": PAD_ID,
        "transformers_version": "4.55.0",
    }


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
