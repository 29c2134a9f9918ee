"""A model computed by `transformers`' own modelling code, unmodified, over our parameters, our KV and packed rows.

Its forward is always run as a whole, and its layers are asked, one by one, whether they are in the range: those before
and behind pass on what they are given, and the first of the range starts from the hidden states of the stage before.
So what a family does before, behind and around its layers, it does by itself. The sequences of a step stand one after
another as one row of a batch; only attention tells them apart, by the step that it is run in.

Shapes as in `model`. The names of `transformers` are imported here and nowhere else but in `transformers_weights`.
"""

import copy
import itertools
import math
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from ballast.common.errors import ConfigError
from ballast.rpc.border import MAX_LAYERS
from ballast.service.logs import get_logger
from services.worker.core.batch import Slice
from services.worker.engine.attention import AttentionBackend, AttentionStep
from services.worker.engine.attention_cuda import CudaAttention
from services.worker.engine.checkpoint import fill_layers
from services.worker.engine.implementation import MemoryNeeds, StageModel
from services.worker.engine.layer_attention import LayerAttention, LayerAttentionStep, LayerKind
from services.worker.engine.lora import Lora, linears_of
from services.worker.engine.model_config import ModelFacts, longest_of, read_eos_token_ids, read_json
from services.worker.engine.native.library import Kernels
from services.worker.engine.packed_attention import PagedAttention
from services.worker.engine.packed_parameters import PackedParameter, is_packed, pack, part_name
from services.worker.engine.packing import Packer
from services.worker.engine.parameters import EMBEDDING
from services.worker.engine.quantised import quantisation_of
from services.worker.engine.transformers_weights import TransformersCheckpoint, parts_of
from services.worker.memory.device import DeviceMemory
from services.worker.memory.kv_cache import KvCache, KvShape
from services.worker.memory.parameters import ParameterStore, TensorSpec

_PAGED, _PROBE = "ballast_paged", "ballast_probe"
_PROBE_ROWS, _TEST_ROWS = 4, 16
# By how much two ways to compute the same may differ, of the largest logit; the rows' median counts, as a router's
# near-ties send a token to other experts.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def read_transformers_config(model_dir: Path) -> tuple[ModelFacts, Any]:
    """What `transformers` makes of config.json. No code of the checkpoint is run.

    Raises:
        ConfigError: it is not a decoder that `transformers` knows.
    """
    path = model_dir / "config.json"
    told = read_json(path)
    quantisation_of(model_dir, told)
    try:
        config: Any = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        known: Any = AutoModelForCausalLM._model_mapping[type(config)]
    except Exception as error:  # of many kinds, by what is wrong in the file
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(str(path), f"transformers makes no decoder of it: {first_line}") from error
    architectures = told.get("architectures")
    name: str = known.__name__
    if isinstance(architectures, list) and architectures and architectures[0] != name:
        why = f"{architectures[0]!r} is not served: transformers has {name} for the model_type {config.model_type!r}"
        raise ConfigError(f"{path}: architectures", why)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # its modules are made as if they were dense
    text = config.get_text_config()
    if config.is_encoder_decoder or text is not config:
        raise ConfigError(f"{path}: model_type", f"{config.model_type!r} is more than a decoder of text")
    layer_count, longest = getattr(text, "num_hidden_layers", 0), longest_of(text)
    if not 1 <= layer_count <= MAX_LAYERS:
        raise ConfigError(f"{path}: num_hidden_layers", f"1 to {MAX_LAYERS} are supported, got {layer_count}")
    if longest is None:
        raise ConfigError(f"{path}: max_position_embeddings", "is missing: how long may a sequence be?")
    dtype = told.get("dtype") or told.get("torch_dtype")
    facts = ModelFacts(
        architecture=name,
        vocab_size=text.vocab_size,
        layer_count=layer_count,
        max_position=longest,
        eos_token_ids=read_eos_token_ids(model_dir),
        checkpoint_dtype=str(dtype).removeprefix("torch.") if dtype else None,
    )
    return facts, config


@dataclass(slots=True)
class _LayerRun:
    """One pass through the model: which layers compute, and what is seen on the way."""

    first: int
    last: int
    hidden: torch.Tensor | None = None  # what the first of them is given
    final: torch.Tensor | None = None  # what is given to what comes behind the layers
    attention: LayerAttentionStep | None = None
    layer: int = 0
    embedded: torch.Tensor | None = None
    result: torch.Tensor | None = None
    seen: dict[int, LayerKind] | None = None  # of a probe


_running = threading.local()  # `.decoder`: whose forward this thread is in


class Decoder:
    """A model of `transformers` whose layers run in ranges."""

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        gives_tuples: bool = False,
        packed: Mapping[str, PackedParameter] | None = None,
    ) -> None:
        """On the meta device: without memory. `packed` parameters stay quantised.

        Raises:
            ConfigError: it cannot be made, or its layers are not found.
        """
        self.config = copy.deepcopy(config)
        try:
            with torch.device("meta"):
                made: Any = AutoModelForCausalLM.from_config(self.config, dtype=dtype, attn_implementation="eager")
        except Exception as error:  # a configuration that its class does not check
            raise ConfigError("config.json", f"transformers cannot make the model: {error}") from error
        self.model, self.config = made.eval(), made.config
        if packed:
            self.config._experts_implementation = "eager"  # one after the other: only those that are needed are made
            pack(self.model, packed, dtype)
        self.layers_name, self.layers = _layers(self.model, self.config.num_hidden_layers)
        self._gives_tuples = gives_tuples
        self._run: _LayerRun | None = None
        for index, layer in enumerate(self.layers):
            layer.forward = self._in_range(index, layer.forward)

    def _in_range(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        last = len(self.layers) - 1

        def layer(*args: Any, **named: Any) -> Any:
            run = self._run
            if run is None:
                return forward(*args, **named)
            hidden = args[0] if args else named.pop("hidden_states")
            if not index:
                run.embedded = hidden
            if not run.first <= index < run.last:
                if index == last and run.final is not None:
                    hidden = run.final
                return (hidden,) if self._gives_tuples else hidden
            if index == run.first and run.hidden is not None:
                hidden = run.hidden
            run.layer = index
            try:
                given = forward(hidden, *args[1:], **named)
            except ConfigError:
                raise
            except Exception:  # experts are chosen by numbers that a probe has not: attention has been seen by then
                if run.seen is None or index not in run.seen:
                    raise
                return (hidden,) if self._gives_tuples else hidden
            if index == run.last - 1:
                run.result = given[0] if isinstance(given, tuple) else given
            return given

        return layer

    @contextmanager
    def _running(self, run: _LayerRun | None, attention: str) -> Generator[None]:
        before = getattr(_running, "decoder", None)
        _running.decoder, self._run = self, run
        if self.config._attn_implementation != attention:
            self.config._attn_implementation = attention
        try:
            yield
        finally:
            _running.decoder, self._run = before, None

    @property
    def run(self) -> _LayerRun:
        assert self._run is not None
        return self._run

    def pass_through(self, run: _LayerRun, *, with_head: bool, **inputs: torch.Tensor) -> Any:
        """The forward of the model, or of what is below its head."""
        with self._running(run, _PAGED):
            return (self.model if with_head else self.model.base_model)(**inputs, use_cache=False)

    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        """logits_TV of one sequence by `transformers` alone: its own attention, all at once."""
        with self._running(None, "eager"):
            return self.model(input_ids=token_ids[None], use_cache=False).logits[0]

    def probe(self) -> list[LayerKind]:
        """What attention is in each layer, found by a forward without memory.

        Raises:
            ConfigError: a layer has another kind of state than keys and values, or cannot be run on packed rows.
        """
        for gives_tuples in (False, True):
            self._gives_tuples = gives_tuples
            run = _LayerRun(0, len(self.layers), seen={})
            ids = torch.ones(1, _PROBE_ROWS, dtype=torch.int64, device="meta")
            try:
                with self._running(run, _PROBE), torch.inference_mode():
                    out = self.model.base_model(input_ids=ids, attention_mask=ids, use_cache=False)
            except ConfigError:
                raise
            except Exception as error:  # whatever the modelling code does with what it is not used to
                if gives_tuples:
                    why = f"{type(self.model).__name__} does not run on packed rows: {error}"
                    raise ConfigError("config.json", why) from error
                continue
            if out[0].dim() == 3 and out[0].shape[:2] == ids.shape:
                break
        assert run.seen is not None
        missing = [i for i in range(len(self.layers)) if i not in run.seen]
        if missing:
            why = f"layer {missing[0]} of {type(self.model).__name__} keeps other state than keys and values"
            raise ConfigError("config.json", f"{why}, or does not say how it attends")
        return [run.seen[i] for i in range(len(self.layers))]


def _layers(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not found:
        raise ConfigError("config.json", f"{type(model).__name__} has no list of {count} layers")
    depths = [name.count(".") for name, _ in found]
    return found[depths.index(min(depths))]


def _attend_paged(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`AttentionInterface`: heads before rows in, rows before heads out."""
    decoder: TransformersDecoder = _running.decoder
    run = decoder.run
    assert run.attention is not None
    q_TNH, k_TKH, v_TKL = (heads[0].transpose(0, 1) for heads in (query, key, value))
    out_TNL = q_TNH.new_empty(q_TNH.shape[0], q_TNH.shape[1], v_TKL.shape[2])
    run.attention.attend(run.layer, decoder.kv.layer(run.layer), q_TNH, k_TKH, v_TKL, out_TNL, s_aux)
    return out_TNL[None], None


def _attend_probe(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    sees = (None, None) if attention_mask is None else getattr(attention_mask, "sees", None)
    if sees is None:
        why = "is neither causal nor a window nor a chunk"
        raise ConfigError("config.json", f"which tokens a token sees in {type(module).__name__} {why}")
    if key.shape[2] != query.shape[2]:
        raise ConfigError("config.json", f"{type(module).__name__} attends to other rows than its own")
    run: _LayerRun = _running.decoder.run
    assert run.seen is not None
    if run.layer in run.seen:
        raise ConfigError("config.json", f"{type(module).__name__} attends more than once in a layer")
    run.seen[run.layer] = LayerKind(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        scale=float(scaling if scaling is not None else query.shape[3] ** -0.5),
        window=sees[0],
        chunk=sees[1],
        soft_cap=softcap,
        has_sinks=s_aux is not None,
    )
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def _probe_mask(
    *given: Any,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    config: Any,
    local_size: int | None = None,
    **_: Any,
) -> torch.Tensor:
    """`AttentionMaskInterface`: a mask without contents that knows which tokens are seen, if that is known here."""
    mask: Any = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    mask.sees = None
    size = local_size or 8
    ends = sorted({0, 1, size - 1, size, size + 1, 2 * size, 3 * size + 1})
    points = [(q, k) for q in ends for k in sorted({*ends, q - size, q - size + 1, q - 1, q}) if k >= 0]
    try:
        seen = [bool(mask_function(*(torch.tensor(i) for i in (0, 0, q, k)))) for q, k in points]
    except NotImplementedError:  # chunks count from the first token behind padding, a number on the meta device
        if local_size and local_size == getattr(config, "attention_chunk_size", None):
            mask.sees = (None, local_size)
        return mask
    for window, chunk in ((None, None), (local_size, None), (None, local_size)):
        first = [q // chunk * chunk if chunk else q + 1 - window if window else 0 for q, _ in points]
        if seen == [low <= k <= q for low, (q, k) in zip(first, points, strict=True)]:
            mask.sees = (window, chunk)
            break
    return mask


AttentionInterface.register(_PAGED, _attend_paged)
AttentionInterface.register(_PROBE, _attend_probe)
AttentionMaskInterface.register(_PROBE, _probe_mask)


class TransformersDecoder(Decoder):
    """A `StageModel`: its parameters are views of our memory, made once."""

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        parameters: ParameterStore,
        kv: KvCache,
        gives_tuples: bool,
        packed: Mapping[str, PackedParameter],
    ) -> None:
        super().__init__(config, dtype, gives_tuples, packed)
        self.kv = kv
        self._bind(parameters, dtype)

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    def reserve(self, rows: int) -> None:
        """Nothing to do: torch's allocator keeps what a step took."""

    def embed(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        run = _LayerRun(0, 0)
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
        run = _LayerRun(first_layer, last_layer, hidden=hidden_TD[None], attention=attention)
        self.pass_through(run, with_head=False, inputs_embeds=hidden_TD[None], position_ids=positions_T[None])
        assert run.result is not None
        return run.result[0]

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        hidden = hidden_RD[None]
        positions = torch.zeros(1, hidden_RD.shape[0], dtype=torch.int64, device=hidden_RD.device)
        run = _LayerRun(0, 0, final=hidden)
        return self.pass_through(run, with_head=True, inputs_embeds=hidden, position_ids=positions).logits[0]

    def adapt(self, lora: Lora) -> None:
        """Whose rows are those of each step from now on."""
        lora.adapt(self.model)

    def _bind(self, parameters: ParameterStore, dtype: torch.dtype) -> None:
        """Parameters and buffers of the checkpoint lie in our memory; other buffers are made as `transformers` does."""
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
    """An `Implementation`: the modelling code of `transformers`."""

    name = "transformers"

    def __init__(
        self, model_dir: Path, facts: ModelFacts, config: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        """
        Raises:
            ConfigError: the model does not run on packed rows over paged KV.
        """
        self.config = facts
        self.pipelines = True
        self._model_dir, self._hf_config, self._dtype, self._device = model_dir, config, dtype, device
        self._skeleton = Decoder(config, dtype)
        self._packed = self._stay_packed()
        if self._packed:
            self._skeleton = Decoder(config, dtype, packed=self._packed)
        self.kinds = self._skeleton.probe()
        self._parts = parts_of(self._skeleton.model, self._skeleton.layers_name, facts.layer_count, dtype)
        self._lock = threading.Lock()

    def _stay_packed(self) -> dict[str, PackedParameter]:
        config = quantisation_of(self._model_dir, read_json(self._model_dir / "config.json"))
        if config is None or not any(self._model_dir.glob("*.safetensors")):
            return {}
        model = self._skeleton.model
        parts = parts_of(model, self._skeleton.layers_name, self.config.layer_count, self._dtype)
        with TransformersCheckpoint(self._model_dir, model, parts, self._dtype) as checkpoint:
            return checkpoint.packed_parameters()

    @property
    def quantised(self) -> str | None:
        """What the values are that stay quantised in memory, if there are any."""
        numbers = {str(parameter.packing.number) for parameter in self._packed.values()}
        return ", ".join(sorted(numbers)) or None

    @property
    def parameter_count(self) -> int:
        parts = [*self._parts.layers, *self._parts.others.values()]
        packed = [(name, parameter.packing) for name, parameter in self._packed.items()]
        theirs = {part_name(name, part) for name, packing in packed for part in packing.specs}
        dense = sum(tensor.numel() for part in parts for name, tensor in part.items() if name not in theirs)
        return dense + sum(math.prod(packing.shape) for _, packing in packed)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        return linears_of(self._skeleton.model, self._skeleton.layers_name)

    @property
    def token_elements(self) -> int:
        """Of the KV of a token in each layer: as many as the largest layer needs, and keys as large as values."""
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
                dtype=self._dtype,
            ),
        )

    def load(self, memory: DeviceMemory, compute_here: Callable[[], None]) -> None:
        store = memory.parameters
        with self._lock, self._open() as opened:
            opened.require_only()
            for part in self._parts.others:
                opened.fill(part, store.part(part))
            fill_layers(store, lambda layer: opened.fill(layer, store.layer(layer)), compute_here)

    def read_layer(self, store: ParameterStore, layer: int) -> None:
        with self._lock, self._open() as opened:
            opened.fill(layer, store.layer(layer))

    def _open(self) -> TransformersCheckpoint:
        return TransformersCheckpoint(self._model_dir, self._skeleton.model, self._parts, self._dtype, self._packed)

    def assemble(
        self, memory: DeviceMemory, kernels: Kernels | None, longest: int
    ) -> tuple[StageModel, AttentionBackend]:
        tuples = self._skeleton._gives_tuples
        model = TransformersDecoder(self._hf_config, self._dtype, memory.parameters, memory.kv, tuples, self._packed)
        slot = 2 * memory.kv.shape.kv_heads * memory.kv.shape.head_dim
        return model, LayerAttention(self.kinds, slot, self._fast(kernels))

    def _fast(self, kernels: Kernels | None) -> Any:
        kind = self.kinds[0]
        if kernels is not None:
            return PagedAttention(kernels)
        alike = all((k.heads, k.kv_heads, k.key_dim) == (kind.heads, kind.kv_heads, kind.key_dim) for k in self.kinds)
        if self._device.type == "cuda" and alike:
            return CudaAttention(kind.heads, kind.kv_heads, kind.key_dim, self._dtype, self._device)
        return None

    def check(self, model: StageModel, attention: AttentionBackend, kv: KvCache) -> None:
        """Compares random rows in one range and in two with what `transformers` computes alone.

        Raises:
            ConfigError: the model on packed rows is another one.
        """
        assert isinstance(model, TransformersDecoder)
        rows = min(_TEST_ROWS, self.config.max_position, kv.block_count * kv.shape.block_tokens)
        ids = torch.randint(0, self.config.vocab_size, (rows,), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            wanted = model.reference(ids.to(self._device)).float()
            if not wanted.isfinite().all():
                get_logger().warning("the self-test says nothing: transformers' own logits are not finite")
                return
            ends, tolerance = self.config.layer_count, _TOLERANCES[self._dtype]
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
        """In two chunks, and then token by token."""
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
    """The largest of the parts' medians."""
    most = 0.0
    for rows, parts in zip(wanted.split([len(part) for part in found]), found, strict=True):
        differing = (rows - parts).abs().amax(1) / rows.abs().amax(1).clamp(min=1e-6)
        median = float(differing.median()) if len(rows) else 0.0
        most = max(most, median if math.isfinite(median) else math.inf)
    return most


def _specs(part: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in part.items()}
