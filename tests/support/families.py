"""Decoder families of `transformers`, as small random checkpoints.

python -m tests.support.families writes the table of docs/your-model.md; each family's test checks its row.
"""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.quantised import DENSE, FORMATS, quantise
from tests.support.reference import Reference

SMALL = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {  # used if the family's configuration has them
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 48,
    "n_shared_experts": 1,
}
_HEAD: dict[str, Any] = {"head_dim": 16}
_WINDOW: dict[str, Any] = {"sliding_window": 16}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
# name -> changed configuration values; a name with a colon is a variant of a family.
_DENSE: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 1},
    "apertus": {},
    "aria_text": {},
    "bitnet": {},
    "arcee": {},
    "cohere": {},
    "cohere2": _WINDOW,
    "cohere2_moe": _WINDOW,
    "cwm": _WINDOW,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dots1": {},
    "ernie4_5": _HEAD,
    "ernie4_5_moe": {},
    "exaone4": _WINDOW,
    "exaone_moe": {},
    "flex_olmo": {},
    "gemma": _HEAD,
    "gemma2": {**_HEAD, **_WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_HEAD, **_WINDOW},
    "glm": _HEAD,
    "glm4": _HEAD,
    "glm4_moe": _HEAD,
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {**_HEAD, **_WINDOW},
    "granite": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "llama": {},
    "llama:heads": {"num_key_value_heads": None},
    "llama:partial": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "llama:yarn": {"rope_parameters": _YARN},
    "llama4_text": {**_HEAD, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 24},
    "minimax_m2": {},
    "ministral": {**_HEAD, **_WINDOW},
    "ministral3": {},
    "mistral": _WINDOW,
    "mixtral": {},
    "nanochat": {},
    "nemotron": {},
    "olmo2": {},
    "olmo3": _WINDOW,
    "olmoe": {},
    "opt": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": _HEAD,
    "qwen3_moe": _HEAD,
    "seed_oss": _HEAD,
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}
_OTHER_STATE = "keeps other state than keys and values, or does not say how it attends"
_QUANTISED: dict[str, dict[str, Any]] = {  # quantised variants of families
    "deepseek_v3:fp8": _LATENT,
    "gpt_oss:mxfp4": {**_HEAD, **_WINDOW},
    "llama:awq": {},
    "llama:fp8 channels": {},
    "llama:fp8 ragged": {},
    "llama:fp8 tensors": {},
    "llama:gptq": {},
    "llama:gptq 8": {},
    "llama:int8": {},
    "llama:w4a16": {},
    "llama:w8a16": {},
    "mixtral:w4a16 zeros": {},
    "qwen3:fp8": _HEAD,
    "qwen3_moe:awq": _HEAD,
    "qwen3_moe:fp8": _HEAD,
    "qwen3_moe:fp8 ragged": _HEAD,
}
FAMILIES = {**_DENSE, **_QUANTISED}
_UNDIVIDED = {"bitnet", "gpt2", "gpt_oss", "gpt_oss:mxfp4", "opt", "stablelm"}  # without a tensor-parallel plan
DIVIDED = sorted(FAMILIES.keys() - _UNDIVIDED)
REFUSED = {  # name -> part of the error that gives the reason
    "bert": "is neither causal nor a window nor a chunk",
    "bloom": _OTHER_STATE,
    "diffllama": "attends more than once in a layer",
    "falcon": _OTHER_STATE,
    "mamba": _OTHER_STATE,
}
PAGE = Path(__file__).parents[2] / "docs" / "your-model.md"
_BEGIN, _END = "| family | class | attention, where it is not plain |\n|---|---|---|\n", "\n<!-- families end -->"


def write_family(name: str, folder: Path) -> Path:
    """Writes a checkpoint of random weights, including norms, since norms of exactly one would hide mistakes. For a
    quantised checkpoint, `dense_of` gives the equivalent dense one.
    """
    form = name.partition(":")[2]
    if form in FORMATS:
        return quantise(_write(name, folder / DENSE), folder / "quantised", form)
    return _write(name, folder)


def _write(name: str, folder: Path) -> Path:
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model_type = name.partition(":")[0]
    config: Any = AutoConfig.for_model(model_type)
    known = config.to_dict()
    wanted = SMALL | {key: value for key, value in EXPERTS.items() if key in known} | FAMILIES.get(name, {})
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(type(config)(**wanted), dtype=torch.float32)
    made_random(model).save_pretrained(folder, max_shard_size="200KB")
    return folder


@torch.no_grad()
def made_random(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def table_line(name: str, architecture: str, extras: Sequence[str]) -> str:
    return f"| {name.replace(':', ', ')} | `{architecture}` | {', '.join(extras)} |\n"


def write_table() -> None:
    from services.worker.engine.describe import describe_model

    before, begin, rest = PAGE.read_text().partition(_BEGIN)
    lines: list[str] = []
    for name in sorted(FAMILIES):
        with tempfile.TemporaryDirectory() as folder:
            told = describe_model(write_family(name, Path(folder)), model_impl="transformers")
        lines.append(table_line(name, told.architecture, told.attention))
    PAGE.write_text(before + begin + "".join(lines) + rest[rest.index(_END) :])


@functools.cache
def _alone(folder: Path) -> Any:
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM, AutoModelForImageTextToText

    whole: Any = AutoModelForImageTextToText
    auto: Any = whole if type(AutoConfig.from_pretrained(folder)) in whole._model_mapping else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def greedy_alone(folder: Path, prompts: Sequence[Sequence[int]], count: int) -> list[Reference]:
    """Greedy tokens of `transformers`' unmodified model, one prompt at a time, without a KV cache."""
    model = _alone(folder)
    found: list[Reference] = []
    for prompt in prompts:
        ids, gaps = list(prompt), list[float]()
        for _ in range(count):
            best = model(torch.tensor([ids]), use_cache=False).logits[0, -1].double().topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
        found.append(Reference(tuple(ids[len(prompt) :]), tuple(gaps)))
    return found


if __name__ == "__main__":
    write_table()
