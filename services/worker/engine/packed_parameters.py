"""Parameters of `transformers` modules that stay quantised in memory and are dequantised only for the products.

Modelling code accesses its parameters as usual: an attribute of the module dequantises on access. Experts are
dequantised one by one if the code uses them one by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from services.worker.engine import scaled_products
from services.worker.engine.division import Division, RankCut
from services.worker.engine.quantised import SCALES, VALUES, Packing, QuantisedMatrix


@dataclass(frozen=True, slots=True)
class Placed:
    """A matrix of the checkpoint and its place in a parameter: the expert and the first row."""

    key: str
    expert: int | None = None
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class RankShare:
    """A rank's slice of a source matrix."""

    cut: RankCut
    division: Division
    cuts_scales: bool  # False: a single scale along the dimension, the same on all ranks

    def of(self, name: str, part: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.cut.of(name, tensor, self.division) if part == VALUES or self.cuts_scales else tensor


@dataclass(frozen=True, slots=True)
class PackedParameter:
    packing: Packing
    sources: Sequence[Placed]
    multiplied: bool = False  # True: products use it without dequantising it, see `scaled_products`
    share: RankShare | None = None  # None: the whole parameter

    def fill(self, name: str, stored: Mapping[str, torch.Tensor], matrices: Mapping[str, QuantisedMatrix]) -> None:
        """Copy the matrices to the parameter's tensors in `stored`, keyed by `part_name`."""
        for source in self.sources:
            matrix = matrices[source.key]
            for part, tensor in matrix.read().items():
                memory = stored[part_name(name, part)]
                if self.share is not None:
                    tensor = self.share.of(name, part, tensor)
                if source.expert is not None:
                    block = self.packing.block[0] if part != VALUES else 1
                    first = source.first_row // block
                    memory = memory[source.expert, first : first + tensor.shape[0]]
                memory.copy_(tensor)


def divided(whole: PackedParameter, cut: RankCut, division: Division) -> PackedParameter | None:
    """A rank's share of a parameter under `cut`; None if shares would split a group that has one scale, or a byte."""
    packing = whole.packing
    if cut.dim is None:
        return None
    axis = cut.dim % len(packing.shape) - len(packing.shape)  # -2 or -1, in the dense shape
    axis = -3 - axis if packing.is_transposed else axis
    joined = len({source.first_row for source in whole.sources}) if axis == -2 else 1  # matrices stacked by rows
    if axis < -2 or cut.parts % joined:
        return None
    size, block = packing.shape[axis] // joined, packing.block[axis]
    each = size // (cut.parts // joined) // division.count
    if (axis == -1 and each * packing.number.bits % 8) or (block < size and each % block):
        return None
    shape, blocks = list(packing.shape), list(packing.block)
    shape[axis] //= division.count
    if block >= size:
        blocks[axis] = size // division.count
    share = replace(packing, shape=tuple(shape), block=(blocks[0], blocks[1]))
    return PackedParameter(
        share,
        [
            replace(source, first_row=source.first_row // (division.count if axis == -2 else 1))
            for source in whole.sources
        ],
        whole.multiplied and scaled_products.fits(share, torch.bfloat16),
        RankShare(RankCut(axis, cut.parts // joined), division, block < size),
    )


def shares_of(
    parameters: Mapping[str, PackedParameter], cuts: Mapping[str, RankCut], division: Division
) -> dict[str, PackedParameter]:
    """Parameters as one rank holds them: its shares of the parameters in `cuts`, and all others whole. Parameters in
    `cuts` that cannot be divided are left out.
    """
    found = {n: divided(p, cuts[n], division) if n in cuts else p for n, p in parameters.items()}
    return {name: parameter for name, parameter in found.items() if parameter is not None}


def part_name(name: str, part: str) -> str:
    return f"{name}_{part}"


def packed_parameters(
    model: nn.Module,
    sources: Mapping[str, Sequence[tuple[str, str | None]]],
    converters: Sequence[WeightConverter],
    matrices: Mapping[str, QuantisedMatrix],
) -> dict[str, PackedParameter]:
    """Parameters by name that can stay quantised as in the checkpoint; all others are dequantised at load.

    `sources`: parameter -> (checkpoint tensor, pattern by which `transformers` mapped it).
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    shared = {*tied, *tied.values()}
    found: dict[str, PackedParameter] = {}
    for name, given in sources.items():
        if name in shared or not all(key in matrices for key, _ in given):
            continue
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if (wanted := module._parameters.get(leaf)) is None:
            continue
        key, pattern = given[0]
        packing = matrices[key].packing
        if len(given) == 1 and pattern is None:
            if (isinstance(module, nn.Linear) or wanted.dim() == 3) and packing.dense_shape == tuple(wanted.shape):
                found[name] = PackedParameter(packing, [Placed(key)])
        elif (placed := _of_experts(given, converters, matrices, wanted)) is not None:
            found[name] = placed
    return found


def _of_experts(
    given: Sequence[tuple[str, str | None]],
    converters: Sequence[WeightConverter],
    matrices: Mapping[str, QuantisedMatrix],
    wanted: torch.Tensor,
) -> PackedParameter | None:
    """Parameter made of expert matrices, stacked along experts, with gate and up joined by rows; None for other
    arrangements.
    """
    pattern, packing = given[0][1], matrices[given[0][0]].packing
    converter = next((one for one in converters if pattern in one.source_patterns), None)
    if converter is None or wanted.dim() != 3 or any(matrices[key].packing != packing for key, _ in given):
        return None
    joins = [type(operation) for operation in converter.operations]
    dims = [getattr(operation, "dim", None) for operation in converter.operations]
    patterns = converter.source_patterns
    if (joins, dims) not in (([MergeModulelist], [0]), ([MergeModulelist, Concatenate], [0, 1])):
        return None
    rows, columns = packing.shape
    experts = wanted.shape[0]
    if tuple(wanted.shape) != (experts, rows * len(patterns), columns) or len(given) != experts * len(patterns):
        return None
    if len(patterns) > 1 and rows % packing.block[0]:
        return None
    placed: list[Placed] = []
    for at, pattern in enumerate(patterns):
        ordered = [key for key, by in given if by == pattern]
        placed += [Placed(key, expert, at * rows) for expert, key in enumerate(ordered)]
    return PackedParameter(replace(packing, shape=tuple(wanted.shape)), placed)


def pack(model: nn.Module, parameters: Mapping[str, PackedParameter], dtype: torch.dtype) -> None:
    """Replace these parameters of `model` with quantised meta tensors; the attributes dequantise to `dtype`."""
    leaves: dict[str, dict[str, PackedParameter]] = {}
    for name, parameter in parameters.items():
        path, _, leaf = name.rpartition(".")
        leaves.setdefault(path, {})[leaf] = parameter
    for path, packed in leaves.items():
        module: Any = model.get_submodule(path)
        packings = {leaf: parameter.packing for leaf, parameter in packed.items()}
        for leaf, packing in packings.items():
            del module._parameters[leaf]
            for part, spec in packing.specs.items():
                empty = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
                module.register_parameter(part_name(leaf, part), nn.Parameter(empty, requires_grad=False))
        made: dict[str, Any] = {leaf: property(_Dense(leaf, packing, dtype)) for leaf, packing in packings.items()}
        if (weight := packed.get("weight")) is not None and weight.multiplied:
            made["forward"] = _forward
        module.__class__ = type(f"Packed{type(module).__name__}", (type(module),), made)


def _forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    held: dict[str, Any] = {part: module._parameters[part_name("weight", part)] for part in (VALUES, SCALES)}
    return scaled_products.product(x, held, module.bias)


def is_packed(module: nn.Module) -> bool:
    return any(isinstance(getattr(member, "fget", None), _Dense) for member in vars(type(module)).values())


class _Dense:
    """Getter of a module attribute: the dequantised parameter, or `Experts`, which dequantise when indexed."""

    def __init__(self, leaf: str, packing: Packing, dtype: torch.dtype) -> None:
        self._leaf, self._packing, self._dtype = leaf, packing, dtype

    def __call__(self, module: nn.Module) -> Any:
        held = module._parameters
        tensors: dict[str, Any] = {part: held[part_name(self._leaf, part)] for part in self._packing.specs}
        if len(self._packing.shape) == 3:
            return Experts(tensors, self._packing, self._dtype)
        return self._packing.dense(tensors, self._dtype)


class Experts:
    """Quantised experts that act as a dense tensor [E, ...]. Indexing a single expert dequantises that one only."""

    def __init__(self, tensors: Mapping[str, Any], packing: Packing, dtype: torch.dtype) -> None:
        self._tensors, self._packing, self._dtype = tensors, packing, dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, int) or (isinstance(index, torch.Tensor) and not index.dim()):
            one = {part: tensor[index] for part, tensor in self._tensors.items()}
            return self._packing.dense(one, self._dtype)
        return self._all()[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._all(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*map(_whole, args), **{name: _whole(value) for name, value in (kwargs or {}).items()})

    def _all(self) -> torch.Tensor:
        return self._packing.dense(self._tensors, self._dtype)


def _whole(value: Any) -> Any:
    return value._all() if isinstance(value, Experts) else value
