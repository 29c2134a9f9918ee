"""Divides a `transformers` model among tensor-parallel ranks, according to the plan in its configuration.

Parameters are sharded, and the outputs of modules are all-reduced or gathered as the plan says. Only layers are
divided: every rank has the whole embedding and head.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ballast.common.errors import ConfigError

_GATHERED = ("colwise_gather_output", "colwise_rep")
_SPLIT = ("rowwise_split_input", "rowwise_rep")
_SUMMED = ("rowwise", *_SPLIT, "moe_tp_experts", "all_reduce")
_WHOLE = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "replicate")
_KNOWN = ("colwise", *_GATHERED, *_SUMMED, "packed_colwise", "packed_rowwise", "moe_identity_expert", *_WHOLE)


@dataclass(frozen=True, slots=True)
class Division:
    """A rank of a tensor-parallel instance."""

    rank: int
    count: int
    sum: Callable[[torch.Tensor], None]  # all-reduce (sum) in place


WHOLE = Division(0, 1, lambda _: None)


@dataclass(frozen=True, slots=True)
class RankCut:
    """How ranks share a parameter: each has an equal slice of each of `parts` bands along `dim`. With `dim` None the
    first rank has the whole parameter and the others zeros.
    """

    dim: int | None
    parts: int = 1

    def of(self, name: str, tensor: torch.Tensor, division: Division) -> torch.Tensor:
        """The rank's share of `tensor`.

        Raises:
            ConfigError: the size is not divisible by the number of ranks.
        """
        if self.dim is None:
            return tensor if not division.rank else torch.zeros_like(tensor)
        size = tensor.shape[self.dim]
        if size % (self.parts * division.count):
            why = f"{division.count} does not divide {name}, which has {size // self.parts} rows or columns to share"
            raise ConfigError("tensor_parallel_size", why)
        dim = self.dim % tensor.dim()
        shares = tensor.unflatten(dim, (self.parts, division.count, -1))
        return shares.select(dim + 1, division.rank).flatten(dim, dim + 1)


def cuts_of(model: Any, layers_name: str, division: Division) -> dict[str, RankCut]:
    """Cuts by parameter name. Parameters without an entry are replicated.

    Raises:
        ConfigError: the model class has no tensor-parallel plan, or one with unknown styles.
    """
    plan = _plan(model, layers_name)
    name = type(model).__name__
    if not plan:
        why = f"transformers has no plan for {name} on several devices: 1 is the most"
        raise ConfigError("tensor_parallel_size", why)
    unknown = sorted({style for style in plan.values() if style not in _KNOWN})
    if unknown:
        why = f"transformers' plan for {name} has {', '.join(unknown)}, which is not supported"
        raise ConfigError("tensor_parallel_size", why)
    cuts: dict[str, RankCut] = {}
    for path, module in model.named_modules():
        style = plan.get(_pattern(path))
        for leaf, parameter in module.named_parameters(recurse=False):
            at = f"{path}.{leaf}"
            own = plan.get(_pattern(at))
            cut = _cut(own, leaf, parameter, own=True) if own is not None else _cut(style, leaf, parameter, own=False)
            if cut is not None:
                cuts[at] = cut
                cut.of(at, parameter, division)
    return cuts


def divide(model: Any, layers_name: str, cuts: Mapping[str, RankCut], division: Division) -> None:
    """Replace the meta parameters with a rank's shares and make modules combine their outputs across ranks."""
    for name, cut in cuts.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        share = cut.of(name, module._parameters[leaf], division)
        empty = torch.empty_like(share, device="meta", memory_format=torch.contiguous_format)
        module._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
    plan = _plan(model, layers_name)
    for path, module in model.named_modules():
        if (style := plan.get(_pattern(path))) in (*_GATHERED, *_SUMMED, "moe_identity_expert"):
            module.forward = _together(str(style), module.forward, division)


def _plan(model: Any, layers_name: str) -> dict[str, str]:
    """Tensor-parallel plan of the layers: pattern of full module names -> style."""
    told: Mapping[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    before, _, layers = layers_name.rpartition(".")
    inside = {pattern: style for pattern, style in told.items() if pattern.startswith(f"{layers}.")}
    return {f"{before}.{pattern}" if before else pattern: style for pattern, style in inside.items()}


def _pattern(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _cut(style: str | None, leaf: str, parameter: torch.Tensor, *, own: bool) -> RankCut | None:
    if style == "colwise" or style in _GATHERED:
        return RankCut(max(parameter.dim() - 2, 0))
    if style == "packed_colwise":
        return RankCut(max(parameter.dim() - 2, 0), 1 if parameter.dim() == 1 else 2)
    if style == "packed_rowwise":
        return None if parameter.dim() == 1 else RankCut(-1, 2)
    if style == "rowwise" or style in _SPLIT:
        return RankCut(None) if leaf == "bias" and not own else RankCut(-1)
    return None


def _together(style: str, forward: Callable[..., Any], division: Division) -> Callable[..., Any]:
    def split(given: torch.Tensor) -> torch.Tensor:
        return given.unflatten(-1, (division.count, -1))[..., division.rank, :]

    def gathered(own: torch.Tensor) -> torch.Tensor:
        shares = own.new_zeros(*own.shape[:-1], division.count, own.shape[-1])
        shares[..., division.rank, :] = own
        division.sum(shares)
        return shares.flatten(-2)

    def module(first: torch.Tensor, *args: Any, **named: Any) -> Any:
        if style == "moe_identity_expert":
            return forward(first / division.count, *args, **named)
        out = forward(split(first) if style in _SPLIT else first, *args, **named)
        if style in _GATHERED:
            return gathered(out)
        out = out.contiguous()
        division.sum(out)
        return out

    return module
