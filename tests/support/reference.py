"""The `transformers` reference for the engine's tokens (I2).

Models are loaded once per process. Greedy decoding is done here on the raw logits, since `generate` rounds them to
float32 before the argmax.
"""

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NEAR_TIE = 1e-5  # closer top-two logits may swap in float32
_BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Reference:
    """Greedy tokens, and for each the gap between the two highest logits."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]


@functools.cache
def reference_model(model_dir: Path, dtype: str) -> Any:  # transformers' classes are not typed for strict use
    """The checkpoint as `transformers` loads it, on the CPU."""
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    return model.eval()


def reference_greedy(model_dir: Path, prompt: Sequence[int], count: int, dtype: str = "float32") -> Reference:
    """The `count` greedy tokens after the prompt; end-of-sequence tokens do not stop generation."""
    return reference_greedy_batch(model_dir, [prompt], [count], dtype)[0]


def reference_greedy_batch(
    model_dir: Path, prompts: Sequence[Sequence[int]], counts: Sequence[int], dtype: str = "float32"
) -> list[Reference]:
    """`reference_greedy` for many prompts, in their order."""
    model = reference_model(model_dir, dtype)
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), counts[i]))
    found: dict[int, Reference] = {}
    while order:
        room = max(1, _BATCH_TOKENS // len(prompts[order[-1]]))
        chosen, order = order[-room:], order[:-room]
        results = _greedy(model, [prompts[i] for i in chosen], max(counts[i] for i in chosen))
        for i, result in zip(chosen, results, strict=True):
            found[i] = Reference(result.token_ids[: counts[i]], result.gaps[: counts[i]])
    return [found[i] for i in range(len(prompts))]


@torch.inference_mode()
def reference_logits(model_dir: Path, token_ids: Sequence[int], dtype: str = "float32") -> torch.Tensor:
    """Logits after every token of one sequence: [tokens, vocabulary]."""
    return reference_model(model_dir, dtype)(torch.tensor([list(token_ids)])).logits[0]


@torch.inference_mode()
def _greedy(model: Any, prompts: Sequence[Sequence[int]], count: int) -> list[Reference]:
    width = max(len(prompt) for prompt in prompts)
    pads = torch.tensor([width - len(prompt) for prompt in prompts])
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = (torch.arange(width) >= pads[:, None]).long()
    positions = (torch.arange(width) - pads[:, None]).clamp(min=0)
    cache, tokens, gaps = None, [], []
    for _ in range(count):
        output = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        cache = output.past_key_values
        best = output.logits[:, -1].topk(2)
        tokens.append(best.indices[:, 0])
        gaps.append((best.values[:, 0] - best.values[:, 1]).double())
        ids, positions = best.indices[:, :1], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=mask.dtype)], 1)
    token_rows, gap_rows = torch.stack(tokens, 1).tolist(), torch.stack(gaps, 1).tolist()
    return [Reference(tuple(t), tuple(g)) for t, g in zip(token_rows, gap_rows, strict=True)]
