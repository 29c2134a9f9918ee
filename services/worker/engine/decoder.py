"""A `transformers` model that can run ranges of its layers, with a replaceable attention.

Its forward always runs as a whole; each layer is wrapped and checks whether it is in the range. Layers outside pass
their input through, and the first layer of the range starts from the hidden states of the previous stage. Everything
that a model family does before, after and around its layers is thus done by its own code. The sequences of a step are
concatenated to one row of a batch; only attention separates them, according to the layout of the current step.
"""

import copy
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from ballast.common.errors import ConfigError
from services.worker.engine.division import WHOLE, Division, RankCut, divide
from services.worker.engine.fused_modules import experts, fuse
from services.worker.engine.layer_attention import LayerAttentionStep, LayerKind
from services.worker.engine.native.library import Kernels
from services.worker.engine.packed_parameters import PackedParameter, pack

_PAGED, _PROBE, _EXPERTS = "ballast_paged", "ballast_probe", "ballast_experts"
_PROBE_ROWS = 4
_ATTENDING = {"full_attention", "attention", "sliding_attention", "chunked_attention", "dense", "sparse", "mlp", "moe"}


@dataclass(slots=True)
class LayerRun:
    """One pass through the model: the layers to compute, and the pass's inputs and results."""

    first: int
    last: int
    hidden: torch.Tensor | None = None  # input of the first layer of the range
    final: torch.Tensor | None = None  # input of the final norm, if the last layer is not in the range
    attention: LayerAttentionStep | None = None
    layer: int = 0
    embedded: torch.Tensor | None = None
    result: torch.Tensor | None = None
    seen: dict[int, LayerKind] | None = None  # attention found by a probe, by layer


_running = threading.local()  # `.decoder`: the one whose forward runs in this thread


class Decoder:
    """A `transformers` model whose layers run in ranges."""

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        packed: Mapping[str, PackedParameter] | None = None,
        cuts: Mapping[str, RankCut] | None = None,
        division: Division = WHOLE,
        *,
        gives_tuples: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        """Create the model on the meta device, without memory. `packed` parameters stay quantised; `cuts` are a rank's
        shares. `kernels` compute the products with dense matrices, including those of experts.

        Raises:
            ConfigError: the model cannot be created, or its layers cannot be found.
        """
        self.config = copy.deepcopy(config)
        try:
            with torch.device("meta"):
                made: Any = AutoModelForCausalLM.from_config(self.config, dtype=dtype, attn_implementation="eager")
        except Exception as error:  # model classes do not validate the configuration: anything may be raised
            raise ConfigError("config.json", f"transformers cannot make the model: {error}") from error
        self.model, self.config = made.eval(), made.config
        self.packed, self.cuts = packed or {}, cuts or {}
        if packed or dtype == torch.float64:  # "eager" supports any dtype, and reads selected experts only
            self.config._experts_implementation = "eager"
        self.kernels, self._experts = kernels, self.config._experts_implementation
        if kernels is not None:
            fuse(self.model, self.packed, kernels, lambda: self._run is not None)
        pack(self.model, self.packed, dtype)
        self.layers_name, self.layers = _layers(self.model, self.config.num_hidden_layers)
        if cuts:
            dense = {name: cut for name, cut in cuts.items() if name not in self.packed}
            divide(self.model, self.layers_name, dense, division)
        self.gives_tuples = gives_tuples
        self._run: LayerRun | None = None
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
                return (hidden,) if self.gives_tuples else hidden
            if index == run.first and run.hidden is not None:
                hidden = run.hidden
            run.layer = index
            try:
                given = forward(hidden, *args[1:], **named)
            except ConfigError:
                raise
            except Exception:  # routing fails on meta tensors, but attention has been recorded by then
                if run.seen is None or index not in run.seen:
                    raise
                return (hidden,) if self.gives_tuples else hidden
            if index == run.last - 1:
                run.result = given[0] if isinstance(given, tuple) else given
            return given

        return layer

    @contextmanager
    def _running(self, run: LayerRun | None, attention: str) -> Generator[None]:
        before = getattr(_running, "decoder", None)
        _running.decoder, self._run = self, run
        if self.config._attn_implementation != attention:
            self.config._attn_implementation = attention
        if self.kernels is not None and not self.packed:
            self.config._experts_implementation = _EXPERTS if run is not None else self._experts
        try:
            yield
        finally:
            _running.decoder, self._run = before, None

    @property
    def run(self) -> LayerRun:
        assert self._run is not None
        return self._run

    def pass_through(self, run: LayerRun, *, with_head: bool, **inputs: torch.Tensor) -> Any:
        """Run the forward of the model, or of its base model without the head."""
        with self._running(run, _PAGED):
            return (self.model if with_head else self.model.base_model)(**inputs, use_cache=False)

    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of one sequence computed by `transformers` alone with its own attention."""
        with self._running(None, "eager"):
            return self.model(input_ids=token_ids[None], use_cache=False).logits[0]

    def probe(self) -> list[LayerKind]:
        """Kind of attention of each layer, found by a forward on the meta device.

        Raises:
            ConfigError: a layer has a state other than keys and values, or cannot run on packed rows.
        """
        for gives_tuples in (False, True):
            self.gives_tuples = gives_tuples
            run = LayerRun(0, len(self.layers), seen={})
            ids = torch.ones(1, _PROBE_ROWS, dtype=torch.int64, device="meta")
            try:
                with self._running(run, _PROBE), torch.inference_mode():
                    out = self.model.base_model(input_ids=ids, attention_mask=ids, use_cache=False)
            except ConfigError:
                raise
            except Exception as error:  # modelling code may raise anything on unusual input
                if gives_tuples:
                    self._require_attention_only(error)
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

    def _require_attention_only(self, error: Exception) -> None:
        """Raise ConfigError if the configuration names layers of kinds that keep other state."""
        told: Any = next((t for n in ("layer_types", "layers_block_type") if (t := getattr(self.config, n, None))), ())
        others = sorted({str(kind) for kind in told} - _ATTENDING)
        if others:
            why = f"the layers of {type(self.model).__name__} of kind {', '.join(others)} keep other state than"
            raise ConfigError("config.json", f"{why} keys and values") from error


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
    """`transformers`' `AttentionInterface`: inputs are [heads, rows], the output is [rows, heads]."""
    decoder = _running.decoder
    run: LayerRun = decoder.run
    assert run.attention is not None
    q_TNH, k_TKH, v_TKL = (heads[0].transpose(0, 1) for heads in (query, key, value))
    out_TNL = q_TNH.new_empty(q_TNH.shape[0], q_TNH.shape[1], v_TKL.shape[2])
    run.attention.attend(run.layer, decoder.kv.layer(run.layer), q_TNH, k_TKH, v_TKL, out_TNL, s_aux)
    return out_TNL[None], None


def _experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """`transformers`' `ExpertsInterface`."""
    return experts(_running.decoder.kernels, module, hidden_states, top_k_index, top_k_weights)


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
        raise ConfigError("config.json", f"the attention mask of {type(module).__name__} {why}")
    if key.shape[2] != query.shape[2]:
        raise ConfigError("config.json", f"{type(module).__name__} attends to other rows than its own")
    run: LayerRun = _running.decoder.run
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
    """`transformers`' `AttentionMaskInterface`: makes a placeholder mask whose `sees` is (window, chunk), or None for
    masks of other kinds.
    """
    mask: Any = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    mask.sees = None
    size = local_size or 8
    ends = sorted({0, 1, size - 1, size, size + 1, 2 * size, 3 * size + 1})
    points = [(q, k) for q in ends for k in sorted({*ends, q - size, q - size + 1, q - 1, q}) if k >= 0]
    try:
        seen = [bool(mask_function(*(torch.tensor(i) for i in (0, 0, q, k)))) for q, k in points]
    except NotImplementedError:  # chunked masks read the first unpadded position, which has no value on meta
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
ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _experts)
AttentionMaskInterface.register(_PROBE, _probe_mask)
