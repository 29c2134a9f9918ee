"""Catalogue entries from a model's config.json: parameters and KV are computed from the shapes.

Supports dense models like Llama, and mixtures of experts like Mixtral and Qwen.
"""

from collections.abc import Mapping
from typing import Any, cast

from ballast.common.errors import ConfigError
from sim.hardware import Gpu, KvCacheDtype, ModelSpec, Quantization

_PARAMETERS_AT_MOST = 0.75  # maximum fraction of an instance's memory: the rest is for KV
_MOST_GPUS = 64
_BIASED = ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM")  # have biases for query, key and value
_NORMED = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")  # have norms for queries and keys
_NOT_COUNTED = ("kv_lora_rank", "ssm_state_size", "state_size", "linear_num_key_heads")


def spec_of_config(name: str, config: Mapping[str, object], gpu: Gpu) -> ModelSpec:
    """A catalogue entry for a model.

    Args:
        name: The model's name.
        config: Its config.json; for a multimodal model its text part is used.
        gpu: Instances use the fewest of these GPUs that leave a quarter of their memory for KV.

    Raises:
        ConfigError: a key is missing or invalid, or a kind of layer is unsupported.
    """
    text = config.get("text_config")
    shape = _ModelSizes(name, {**config, **cast("Mapping[str, object]", text)} if isinstance(text, Mapping) else config)
    for key in _NOT_COUNTED:
        if shape.config.get(key):
            raise ConfigError(f"{name}: config.json: {key}", "layers of this kind cannot be counted; no estimate")
    per_layer, experts = shape.layer_parameters(), shape.expert_parameters()
    ends = shape.vocabulary * shape.hidden * (1 if shape.config.get("tie_word_embeddings") else 2) + shape.hidden
    count = shape.layers * (per_layer + shape.experts * experts) + ends
    chosen = shape.experts_per_token
    spec = ModelSpec(
        name=name,
        architecture=shape.architecture,
        parameter_count=count,
        other_parameter_count=ends,
        active_parameter_count=shape.layers * (per_layer + chosen * experts) + ends if experts else None,
        expert_parameter_count=shape.layers * shape.experts * experts,
        experts_per_layer=shape.experts,
        experts_per_token=chosen,
        layer_count=shape.layers,
        hidden_size=shape.hidden,
        attention_width=shape.heads * shape.head_dim,
        kv_elements_per_token_layer=2 * shape.kv_heads * shape.head_dim,
        vocab_size=shape.vocabulary,
        max_model_len=shape.number("max_position_embeddings"),
        gpus_per_instance=1,
        quantization=_quantization(shape.config.get("quantization_config"), name),
        source=f"config.json of {name}",
    )
    return spec.model_copy(update={"gpus_per_instance": _gpus(spec.parameter_bytes, gpu, name)})


def stored_as(spec: ModelSpec, gpu: Gpu, quantization: Quantization | None, kv_cache_dtype: KvCacheDtype) -> ModelSpec:
    """The model with its layers and KV in these formats; None: unchanged. A quantised model takes the fewest GPUs that
    leave a quarter of their memory for KV, and at most as many as before.
    """
    spec = spec.model_copy(update={"kv_cache_dtype": kv_cache_dtype})
    if quantization is None:
        return spec
    spec = spec.model_copy(update={"quantization": quantization})
    gpus = min(spec.gpus_per_instance, _gpus(spec.parameter_bytes, gpu, spec.name))
    return spec.model_copy(update={"gpus_per_instance": gpus})


def _quantization(config: object, name: str) -> Quantization | None:
    """The format that a checkpoint's config.json declares."""
    if not isinstance(config, Mapping):
        return None
    told = cast("dict[str, Any]", config)
    groups: dict[str, dict[str, Any]] = told.get("config_groups", {})
    group = next(iter(groups.values()), dict[str, Any]())
    weights: dict[str, Any] = group.get("weights") or {}
    method, bits = str(told.get("quant_method")), weights.get("num_bits", told.get("bits", 4))
    is_float = weights.get("type") == "float"
    if method in ("fp8", "fbgemm_fp8") or (is_float and bits == 8):
        return "fp8"
    if method == "mxfp4":
        return "mxfp4"
    if method not in ("compressed-tensors", "awq", "gptq") or bits not in (4, 8) or is_float:
        why = f"{method!r} with {bits} bits cannot be counted; no estimate"
        raise ConfigError(f"{name}: config.json: quantization_config", why)
    if bits == 4:
        return "w4a16"
    return "int8" if group.get("input_activations") else "w8a16"


def _gpus(parameter_bytes: int, gpu: Gpu, name: str) -> int:
    count = 1
    while parameter_bytes > count * gpu.memory_bytes * _PARAMETERS_AT_MOST:
        count *= 2
        if count > _MOST_GPUS:
            raise ConfigError(name, f"does not fit into {_MOST_GPUS} {gpu.name}")
    return count


class _ModelSizes:
    def __init__(self, name: str, config: Mapping[str, object]) -> None:
        self._name = name
        self.config = config
        architectures = config.get("architectures")
        self.architecture = str(cast("list[object]", architectures)[0]) if architectures else "unknown"
        self.layers = self.number("num_hidden_layers")
        self.hidden = self.number("hidden_size")
        self.heads = self.number("num_attention_heads")
        self.kv_heads = self.number("num_key_value_heads", self.heads)
        self.head_dim = self.number("head_dim", self.hidden // self.heads)
        self.vocabulary = self.number("vocab_size")
        self.experts = self.number("num_local_experts", self.number("num_experts", 0))
        self.experts_per_token = self.number("num_experts_per_tok", 0) if self.experts else 0

    def number(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or value < 0:
            raise ConfigError(f"{self._name}: config.json: {key}", f"must be a whole number, got {value!r}")
        return value

    def layer_parameters(self) -> int:
        """Parameters of one layer without routed experts."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * queries + 2 * keys)
        if self.architecture in _BIASED:
            attention += queries + 2 * keys
        if self.architecture in _NORMED:
            attention += 2 * self.head_dim
        mlp = 3 * self.hidden * self.number("intermediate_size")
        if self.experts:
            mlp = self.experts * self.hidden + 3 * self.hidden * self.number("shared_expert_intermediate_size", 0)
        return attention + mlp + 2 * self.hidden

    def expert_parameters(self) -> int:
        """Parameters of one expert in a layer."""
        if not self.experts:
            return 0
        return 3 * self.hidden * self.number("moe_intermediate_size", self.number("intermediate_size"))
