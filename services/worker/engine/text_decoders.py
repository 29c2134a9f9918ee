"""Text decoders of multimodal models for which `transformers` has no causal LM class."""

import importlib
from typing import Any

import torch
from torch import nn
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

# Model types whose logits were compared with the full model's (`make model-types`): others may transform the logits
# after the linear head.
_COMPARED = frozenset(
    [
        "glm4v_moe_text",
        "glm4v_text",
        "glm_ocr_text",
        "granite_docling_text",
        "hunyuan_vl_text",
        "muse_glimmer_text",
        "paddleocr_vl_text",
        "qwen2_5_omni_text",
        "qwen2_5_vl_text",
        "qwen2_vl_text",
        "qwen3_omni_moe_text",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
        "step3p5",
    ]
)


def register_text_decoder(text: Any) -> None:
    """Let `AutoModelForCausalLM` create the base model of this text config with a linear head. No-op if a class is
    registered for the config already, or if its logits have not been compared.
    """
    kind = type(text)
    if text.model_type not in _COMPARED or kind in AutoModelForCausalLM._model_mapping:
        return
    module = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
    classes = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, PreTrainedModel)]
    base: Any = next(each for each in classes if each.config_class is kind and each.__name__.endswith("TextModel"))
    family = next(each for each in base.__mro__ if each is not base and issubclass(each, PreTrainedModel))

    class TextDecoder(family, GenerationMixin):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
        config_class = kind
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 as transformers writes it

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = base(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, **inputs: Any) -> CausalLMOutputWithPast:
            hidden: torch.Tensor = self.model(**inputs).last_hidden_state
            return CausalLMOutputWithPast(logits=self.lm_head(hidden))

    TextDecoder.__name__ = TextDecoder.__qualname__ = base.__name__.removesuffix("Model") + "ForCausalLM"
    AutoModelForCausalLM.register(kind, TextDecoder, exist_ok=True)
