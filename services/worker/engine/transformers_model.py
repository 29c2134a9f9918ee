"""A model computed by the unmodified modelling code of `transformers`, over our parameters, our KV and packed rows.

Shapes as in `model`. `decoder` explains how its layers run.
"""

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from ballast.common.errors import ConfigError
from ballast.rpc.border import MAX_LAYERS
from ballast.service.logs import get_logger
from services.worker.core.batch import Slice
from services.worker.engine.attention import AttentionBackend, AttentionStep
from services.worker.engine.attention_cuda import CudaAttention
from services.worker.engine.checkpoint import fill_layers
from services.worker.engine.decoder import Decoder, LayerRun
from services.worker.engine.division import WHOLE, Division, RankCut, cuts_of
from services.worker.engine.implementation import MemoryNeeds, StageModel
from services.worker.engine.kv_dtype import FP8, checkpoint_scales
from services.worker.engine.layer_attention import LayerAttention, LayerAttentionStep, LayerKind
from services.worker.engine.lora import Lora, linears_of
from services.worker.engine.model_config import ModelFacts, longest_of, read_eos_token_ids, read_json
from services.worker.engine.native.library import Kernels
from services.worker.engine.packed_attention import PagedAttention
from services.worker.engine.packed_parameters import PackedParameter, is_packed, part_name, shares_of
from services.worker.engine.packing import Packer
from services.worker.engine.parameters import EMBEDDING
from services.worker.engine.quantised import quantisation_of
from services.worker.engine.scaled_products import device_multiplies, fits, quantises_activations
from services.worker.engine.text_decoders import register_text_decoder
from services.worker.engine.transformers_weights import TransformersCheckpoint, has_head, parts_of
from services.worker.memory.device import DeviceMemory
from services.worker.memory.kv_cache import KvCache, KvShape
from services.worker.memory.parameters import ParameterStore, TensorSpec

_TEST_ROWS = 16
# Tolerance between two computations, relative to the largest logit. The median over rows is compared, as near-ties in a
# router send some tokens to other experts.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
_FP8_TOLERANCE = 0.3  # of float8 KV, whose relative error is up to 1 / 16
_WHOLES: tuple[Any, ...] = (AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping)
# Models whose logits for text differ from the logits of their decoder's class, or that cannot generate text on their
# own.
_NOT_ITS_DECODER = {
    "aya_vision": "computes other logits for text than its decoder alone",
    "cohere2_vision": "computes other logits for text than its decoder alone",
    "gemma4_unified_assistant": "drafts tokens for another model",
    "shieldgemma2": "classifies images",
}

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


def read_transformers_config(model_dir: Path) -> tuple[ModelFacts, Any]:
    """Read config.json with `transformers`; for a multimodal model, the part of its text decoder. No code of the
    checkpoint is executed.

    Raises:
        ConfigError: it is not a decoder that `transformers` supports.
    """
    path = model_dir / "config.json"
    told = read_json(path)
    quantisation_of(model_dir, told)
    try:
        config: Any = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        text: Any = config.get_text_config(decoder=True)
        if text is not config and not config.is_encoder_decoder:
            register_text_decoder(text)
    except Exception as error:  # the exception type depends on the error in the file
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(str(path), f"transformers makes no decoder of it: {first_line}") from error
    if config.is_encoder_decoder:
        raise ConfigError(f"{path}: model_type", f"{config.model_type!r} has an encoder; only decoders are served")
    if config.model_type in _NOT_ITS_DECODER:
        raise ConfigError(f"{path}: model_type", f"{config.model_type!r} {_NOT_ITS_DECODER[config.model_type]}")
    if type(text) not in AutoModelForCausalLM._model_mapping:
        why = f"transformers has no causal language model class for the text decoder of {config.model_type!r}"
        raise ConfigError(f"{path}: model_type", why)
    known: Any = AutoModelForCausalLM._model_mapping[type(text)]
    architectures = told.get("architectures")
    name: str = known.__name__
    whole = [each[type(config)].__name__ for each in _WHOLES if type(config) in each] if text is not config else [name]
    if isinstance(architectures, list) and architectures and architectures[0] not in whole:
        why = f"{architectures[0]!r} is not served: transformers has {name} for the model_type {config.model_type!r}"
        raise ConfigError(f"{path}: architectures", why)
    if hasattr(text, "quantization_config"):
        del text.quantization_config  # create its modules as if they were dense
    if text is not config:
        ties = any(getattr(each, "tie_word_embeddings", False) for each in (config, text))
        text.tie_word_embeddings = ties and not has_head(model_dir)
    layer_count, longest = getattr(text, "num_hidden_layers", 0), longest_of(text)
    if not 1 <= layer_count <= MAX_LAYERS:
        raise ConfigError(f"{path}: num_hidden_layers", f"1 to {MAX_LAYERS} are supported, got {layer_count}")
    if longest is None:
        raise ConfigError(
            f"{path}: max_position_embeddings", "is missing; models with ALiBi or recurrent layers are not served"
        )
    dtype = told.get("dtype") or told.get("torch_dtype") or (text.dtype if text is not config else None)
    eos_token_ids = read_eos_token_ids(model_dir)
    ends = getattr(text, "eos_token_id", None)
    if text is not config and not eos_token_ids and ends is not None:
        eos_token_ids = tuple(ends) if isinstance(ends, list) else (ends,)
    facts = ModelFacts(
        architecture=name,
        vocab_size=text.vocab_size,
        layer_count=layer_count,
        max_position=longest,
        eos_token_ids=eos_token_ids,
        checkpoint_dtype=str(dtype).removeprefix("torch.") if dtype else None,
    )
    return facts, text


class TransformersDecoder(Decoder):
    """A `StageModel` whose parameters are views of the parameter store, created once."""

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        parameters: ParameterStore,
        kv: KvCache,
        like: Decoder,
        division: Division,
        kernels: Kernels | None,
    ) -> None:
        """The model is sharded and quantised in the same way as `like`, a model on the meta device. `division` provides
        the all-reduce over the ranks.
        """
        super().__init__(
            config, dtype, like.packed, like.cuts, division, gives_tuples=like.gives_tuples, kernels=kernels
        )
        self.kv = kv
        self._bind(parameters, dtype)

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    def reserve(self, rows: int) -> None:
        """No-op: torch's caching allocator reuses the memory of earlier steps."""

    def embed(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        run = LayerRun(0, 0)
        self.pass_through(run, with_head=False, input_ids=token_ids_T[None], position_ids=positions_T[None])
        assert run.embedded is not None
        return run.embedded[0].clone()

    def run_layers(
        self,
        hidden_TD: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionStep,
        *,
        first_layer: int,
        last_layer: int,
    ) -> torch.Tensor:
        assert isinstance(attention, LayerAttentionStep)
        if first_layer == last_layer:
            return hidden_TD
        run = LayerRun(first_layer, last_layer, hidden=hidden_TD[None], attention=attention)
        inputs = hidden_TD[None].clone()  # scaled in place by some models
        self.pass_through(run, with_head=False, inputs_embeds=inputs, position_ids=positions_T[None])
        assert run.result is not None
        return run.result[0]

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        hidden = hidden_RD[None]
        positions = torch.zeros(1, hidden_RD.shape[0], dtype=torch.int64, device=hidden_RD.device)
        run = LayerRun(0, 0, final=hidden)
        return self.pass_through(run, with_head=True, inputs_embeds=hidden.clone(), position_ids=positions).logits[0]

    def adapt(self, lora: Lora) -> None:
        """Set the adapters; `Lora.use` assigns rows to them for each step."""
        lora.adapt(self.model)

    def _bind(self, parameters: ParameterStore, dtype: torch.dtype) -> None:
        """Bind parameters and persistent buffers to the store's tensors; `transformers` initialises other buffers."""
        views: dict[int, torch.Tensor] = {}
        parts = parts_of(self.model, self.layers_name, len(self.layers), dtype)
        device = parameters.part(EMBEDDING)[next(iter(parts.others[EMBEDDING]))].device
        for index, specs in enumerate(parts.layers):
            for name, stored in parameters.layer(index).items():
                views[id(specs[name])] = stored
        for part, specs in parts.others.items():
            for name, stored in parameters.part(part).items():
                views[id(specs[name])] = stored
        bound: dict[int, Any] = {}
        for module in self.model.modules():
            module._is_hf_initialized = is_packed(module)
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    if id(tensor) not in bound:
                        bound[id(tensor)] = nn.Parameter(views[id(tensor)], requires_grad=False)
                        bound[id(tensor)]._is_hf_initialized = True
                    module._parameters[name] = bound[id(tensor)]
            for name, tensor in module._buffers.items():
                if tensor is None:
                    continue
                view = views.get(id(tensor))
                if view is not None:
                    view._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
                module._buffers[name] = view if view is not None else torch.empty_like(tensor, device=device)
        with torch.no_grad():
            self.model.initialize_weights()


class TransformersModel:
    """An `Implementation` with the modelling code of `transformers`."""

    name = "transformers"

    def __init__(
        self,
        model_dir: Path,
        facts: ModelFacts,
        config: Any,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        division: Division = WHOLE,
    ) -> None:
        """Raises ConfigError if the model does not run on packed rows over paged KV, or cannot be divided among the
        ranks.
        """
        self.config = replace(facts, rank=division.rank, rank_count=division.count)
        self.pipelines = True
        self._model_dir, self._hf_config, self._device = model_dir, config, device
        self.dtype, self._kv_dtype = dtype, kv_dtype
        self._division = division
        self._whole = Decoder(config, dtype)
        cuts = cuts_of(self._whole.model, self._whole.layers_name, division) if division.count > 1 else {}
        self._packed = self._stay_packed(cuts)
        if self._packed:
            self._whole = Decoder(config, dtype, self._packed)
        self.kinds = self._whole.probe()
        self._skeleton = self._whole
        if division.count > 1:
            self._skeleton = self._divided(cuts)
        if kv_dtype == FP8 and any(model_dir.glob("*.safetensors")):
            self.kinds = self._with_kv_scales(self.kinds)
        self._parts, self._whole_parts = (
            parts_of(one.model, one.layers_name, facts.layer_count, dtype) for one in (self._skeleton, self._whole)
        )
        self._lock = threading.Lock()
        if any(model_dir.glob("*.safetensors")):
            with self._open() as opened:
                opened.require_only()

    def _with_kv_scales(self, kinds: Sequence[LayerKind]) -> list[LayerKind]:
        """The layers' attention with the checkpoint's scales of KV."""
        scales = checkpoint_scales(self._model_dir)
        if any(kind.key_dim != kind.value_dim for kind in kinds):  # MLA: scales are for the latent, not for K and V
            if scales:
                get_logger().warning("the checkpoint's scales of KV are ignored: they are those of a latent")
            return [*kinds]
        if scales:
            get_logger().info("KV is stored with the checkpoint's scales", layers=len(scales))
        both = [scales.get(layer, (1.0, 1.0)) for layer in range(len(kinds))]
        return [
            replace(kind, scale=kind.scale * key, key_scale=key, value_scale=value)
            for kind, (key, value) in zip(kinds, both, strict=True)
        ]

    def _divided(self, cuts: Mapping[str, RankCut]) -> Decoder:
        """The model with this rank's share of the parameters. Also updates `kinds` for this share."""
        shares = shares_of(self._packed, cuts, self._division)
        divided = Decoder(self._hf_config, self.dtype, shares, cuts, replace(self._division, sum=WHOLE.sum))
        count, whole = self._division.count, self.kinds
        try:
            self.kinds = divided.probe()
        except ConfigError as error:
            raise ConfigError("tensor_parallel_size", f"{count} does not divide the heads: {error.why}") from error
        for layer, (all_of, own) in enumerate(zip(whole, self.kinds, strict=True)):
            shares = {(all_of.heads // share, all_of.kv_heads / share) for share in (1, count)}
            if (own.heads, own.kv_heads) not in shares or own.key_dim != all_of.key_dim:
                heads = f"{all_of.heads} attention heads and {all_of.kv_heads} KV heads"
                raise ConfigError("tensor_parallel_size", f"{count} does not divide the {heads} of layer {layer}")
        return divided

    def _stay_packed(self, cuts: Mapping[str, RankCut]) -> dict[str, PackedParameter]:
        """Parameters that stay quantised. With several ranks, these are only parameters that can be sharded without
        dequantising.
        """
        config = quantisation_of(self._model_dir, read_json(self._model_dir / "config.json"))
        if config is None or not any(self._model_dir.glob("*.safetensors")):
            return {}
        model = self._whole.model
        parts = parts_of(model, self._whole.layers_name, self.config.layer_count, self.dtype)
        with TransformersCheckpoint(self._model_dir, model, parts, self.dtype) as checkpoint:
            found = checkpoint.packed_parameters()
        if self._division.count > 1:
            possible = shares_of(found, cuts, self._division)
            if len(possible) < len(found):
                why = "sharding them would split a group that shares a scale"
                get_logger().warning("made dense", quantised_parameters=len(found) - len(possible), why=why)
            found = {name: parameter for name, parameter in found.items() if name in possible}
        if not (quantises_activations(config) and device_multiplies(self._device)):
            return found
        return {n: replace(p, multiplied=fits(p.packing, self.dtype)) for n, p in found.items()}

    @property
    def quantised(self) -> str | None:
        """Number formats of parameters that stay quantised in memory, if any."""
        numbers = {str(parameter.packing.number) for parameter in self._packed.values()}
        return ", ".join(sorted(numbers)) or None

    @property
    def parameter_count(self) -> int:
        parts = [*self._whole_parts.layers, *self._whole_parts.others.values()]
        packed = [(name, parameter.packing) for name, parameter in self._packed.items()]
        theirs = {part_name(name, part) for name, packing in packed for part in packing.specs}
        dense = sum(tensor.numel() for part in parts for name, tensor in part.items() if name not in theirs)
        return dense + sum(math.prod(packing.shape) for _, packing in packed)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        return linears_of(self._whole.model, self._whole.layers_name)

    @property
    def token_elements(self) -> int:
        """KV elements per token of the largest layer, rounded up to an even number because a slot has equal halves."""
        most = max(kind.token_elements for kind in self.kinds)
        return most + most % 2

    def needs(self, block_tokens: int) -> MemoryNeeds:
        kind = self.kinds[0]
        if all((k.kv_heads, k.key_dim, k.value_dim) == (kind.kv_heads, kind.key_dim, kind.key_dim) for k in self.kinds):
            heads, width = kind.kv_heads, kind.key_dim
        else:
            heads, width = 1, self.token_elements // 2
        return MemoryNeeds(
            layers=[_specs(part) for part in self._parts.layers],
            others={name: _specs(part) for name, part in self._parts.others.items()},
            kv_shape=KvShape(
                layer_count=self.config.layer_count,
                block_tokens=block_tokens,
                kv_heads=heads,
                head_dim=width,
                dtype=self._kv_dtype,
            ),
        )

    def load(self, memory: DeviceMemory, compute_here: Callable[[], None]) -> None:
        store = memory.parameters
        with self._lock, self._open() as opened:
            for part in self._parts.others:
                opened.fill(part, store.part(part))
            fill_layers(store, lambda layer: opened.fill(layer, store.layer(layer)), compute_here)

    def read_layer(self, store: ParameterStore, layer: int) -> None:
        first = self._division.rank

        def fill(rank: int, one: ParameterStore) -> None:
            with self._lock, self._open(rank if one is not store else first) as opened:
                opened.fill(layer, one.layer(layer))

        store.fill(layer, fill)

    def _open(self, rank: int | None = None) -> TransformersCheckpoint:
        division = self._division if rank is None else replace(self._division, rank=rank)
        cuts = self._skeleton.cuts

        def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return cuts[name].of(name, tensor, division) if name in cuts else tensor

        whole = self._whole
        packed = shares_of(self._packed, cuts, division) if division.count > 1 else self._packed
        return TransformersCheckpoint(self._model_dir, whole.model, self._whole_parts, self.dtype, packed, cut)

    def assemble(
        self, memory: DeviceMemory, kernels: Kernels | None, longest: int
    ) -> tuple[StageModel, AttentionBackend]:
        model = TransformersDecoder(
            self._hf_config, self.dtype, memory.parameters, memory.kv, self._skeleton, self._division, kernels
        )
        slot = 2 * memory.kv.shape.kv_heads * memory.kv.shape.head_dim
        return model, LayerAttention(self.kinds, slot, self._fast(kernels, memory.kv.shape.dtype))

    def _fast(self, kernels: Kernels | None, kv_dtype: torch.dtype) -> Any:
        kind = self.kinds[0]
        if kernels is not None:
            return PagedAttention(kernels)
        alike = all((k.heads, k.kv_heads, k.key_dim) == (kind.heads, kind.kv_heads, kind.key_dim) for k in self.kinds)
        if self._device.type == "cuda" and alike:
            heads = (kind.heads, kind.kv_heads, kind.key_dim)
            return CudaAttention(*heads, self.dtype, self._device, kv_dtype=kv_dtype)
        return None

    def check(self, model: StageModel, attention: AttentionBackend, kv: KvCache) -> None:
        """Compare logits of random tokens, computed in one range of layers, with the logits of `transformers`. Sets
        `pipelines` to False if the logits differ when computed in two ranges.

        Raises:
            ConfigError: the logits computed in one range differ.
        """
        assert isinstance(model, TransformersDecoder)
        rows = min(_TEST_ROWS, self.config.max_position, kv.block_count * kv.shape.block_tokens)
        ids = torch.randint(0, self.config.vocab_size, (rows,), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            wanted = model.reference(ids.to(self._device)).float()
            if not wanted.isfinite().all():
                get_logger().warning("the self-test says nothing: transformers' own logits are not finite")
                return
            ends, tolerance = self.config.layer_count, _TOLERANCES[self.dtype]
            if self._kv_dtype == FP8:
                tolerance = max(tolerance, _FP8_TOLERANCE)
            apart = _apart(wanted, self._test_logits(model, attention, kv, ids, (0, ends)))
            if apart > tolerance:
                why = f"{self.config.architecture} on packed rows gives other logits than alone, by {apart:.1e}"
                raise ConfigError(f"{self._model_dir / 'config.json'}", why)
            if ends > 1:
                apart = _apart(wanted, self._test_logits(model, attention, kv, ids, (0, ends // 2, ends)))
                self.pipelines = apart <= tolerance
        if not self.pipelines:
            get_logger().warning(
                "this instance takes part in no drop: its layers cannot be divided among workers",
                model=self.config.architecture,
                apart=apart,
            )

    def _test_logits(
        self,
        model: StageModel,
        attention: AttentionBackend,
        kv: KvCache,
        ids: torch.Tensor,
        borders: tuple[int, ...],
    ) -> Sequence[torch.Tensor]:
        """Logits computed in two chunks, and then token by token: one tensor for each of these three parts."""
        size, first = kv.shape.block_tokens, kv.window.first_block
        table = tuple(range(first, first - (-len(ids) // size)))
        tokens = tuple(ids.tolist())
        found: list[torch.Tensor] = []
        third, last = len(tokens) // 3, len(tokens)
        for begin, end in itertools.pairwise(sorted({0, third, *range(2 * third, last + 1)})):
            packed = Packer(size).pack([Slice(0, begin, tokens[begin:end], True)], [table])
            token_ids = torch.from_numpy(packed.token_ids_T).to(self._device)
            positions = torch.from_numpy(packed.positions_T).to(self._device)
            hidden = model.embed(token_ids, positions)
            for low, high in itertools.pairwise(borders):
                step = attention.prepare(packed)
                hidden = model.run_layers(hidden, positions, step, first_layer=low, last_layer=high)
            found.append(model.logits(hidden).float())
        return torch.cat(found).split([third, third, last - 2 * third])


def _apart(wanted: torch.Tensor, found: Sequence[torch.Tensor]) -> float:
    """The largest of the parts' median differences, relative to each row's largest logit."""
    most = 0.0
    for rows, parts in zip(wanted.split([len(part) for part in found]), found, strict=True):
        differing = (rows - parts).abs().amax(1) / rows.abs().amax(1).clamp(min=1e-6)
        median = float(differing.median()) if len(rows) else 0.0
        most = max(most, median if math.isfinite(median) else math.inf)
    return most


def _specs(part: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in part.items()}
