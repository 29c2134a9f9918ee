"""LoRA adapters in memory: they add `(x @ A.T) @ B.T` to the rows of sequences that use one.

Every member of a group keeps all layers of every adapter, a few MiB each, whichever layers it computes, so that drops
and restores do not affect adapters. Ranks divide an adapter as they divide the module: B by outputs, or A by inputs.
Partial products of a divided A are summed over the ranks together with the module's. Legend: R rows of one adapter
among the T rows of a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import NewSequence, SequenceId, Slice
from services.worker.engine.lora_files import WEIGHTS, AdapterFiles, divides_inputs
from services.worker.engine.packing import PackedStep
from services.worker.engine.upload import upload


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter's low-rank update of one linear module, whose output starts at `first_column` of a joined product."""

    first_column: int
    a_rD: torch.Tensor
    b_Or: torch.Tensor  # premultiplied by the adapter's scale

    def add_to(self, x_RD: torch.Tensor, rows_R: torch.Tensor, out_TO: torch.Tensor) -> None:
        added_RO = torch.mm(torch.mm(x_RD, self.a_rD.t()), self.b_Or.t())
        columns = slice(self.first_column, self.first_column + self.b_Or.shape[0])
        out_TO[:, columns].index_add_(0, rows_R, added_RO)


Product = Sequence[Sequence[LowRank]]  # adapter index -> its additions to one matrix product
AdapterRows = Sequence[tuple[int, np.ndarray]]  # (adapter index, its rows of a step) of each adapter in use


class Lora:
    """All adapters of an engine, and the rows of the current step that use each. Used by one thread at a time."""

    def __init__(
        self,
        adapters: Sequence[AdapterFiles],
        dtype: torch.dtype,
        device: torch.device,
        rank: int = 0,
        rank_count: int = 1,
    ) -> None:
        self.adapters = tuple(adapters)
        self._device = device
        self._matrices = [_read(one, dtype, device, rank, rank_count) for one in adapters]
        self._index = {one.name: i for i, one in enumerate(adapters)}
        self._of: dict[SequenceId, int] = {}
        self._rows: list[tuple[int, torch.Tensor]] = []

    @property
    def modules(self) -> set[str]:
        """Names of the modules that any adapter modifies."""
        return {module for one in self.adapters for module in one.ranks}

    def product(self, modules: Iterable[tuple[str, int]]) -> Product:
        """The adapters' additions to the product of modules fused into one matrix: (name, first column) of each."""
        modules = tuple(modules)
        return [
            [LowRank(column, *matrices[module]) for module, column in modules if module in matrices]
            for matrices in self._matrices
        ]

    def add(self, new: NewSequence) -> None:
        name = new.sampling.adapter
        if not name:
            return
        if name not in self._index:
            raise InvariantViolation(f"sequence {new.sequence_id} has the adapter {name!r}, which is not loaded here")
        self._of[new.sequence_id] = self._index[name]

    def remove(self, sequence_id: SequenceId) -> None:
        self._of.pop(sequence_id, None)

    def forget_all(self) -> None:
        self._of.clear()

    def rows_of(self, slices: Sequence[Slice], packed: PackedStep) -> AdapterRows:
        """The step's rows that have an adapter."""
        found: dict[int, list[np.ndarray]] = {}
        for part, first in zip(slices, packed.first_rows.tolist(), strict=True) if self._of else ():
            if (index := self._of.get(part.sequence_id)) is not None:
                found.setdefault(index, []).append(np.arange(first, first + len(part.token_ids)))
        return [(index, np.concatenate(rows)) for index, rows in found.items()]

    def use(self, rows: AdapterRows) -> None:
        """Set the rows of the next step."""
        uploaded = upload([each for _, each in rows], self._device) if rows else ()
        self._rows = [(index, each) for (index, _), each in zip(rows, uploaded, strict=True)]

    def adapt(self, model: nn.Module) -> None:
        """Add the adapters to the model's linear modules by forward hooks. Inputs must be packed rows, [1, T, D]."""
        for name in sorted(self.modules):
            product = self.product([(name, 0)])

            def add(_: nn.Module, given: tuple[torch.Tensor], out: torch.Tensor, product: Product = product) -> None:
                x_TD, out_TO = given[0].reshape(-1, given[0].shape[-1]), out.view(-1, out.shape[-1])
                self.add_to(product, x_TD, out_TO)

            model.get_submodule(name).register_forward_hook(add)

    def add_to(self, product: Product, x_TD: torch.Tensor, out_TO: torch.Tensor) -> None:
        """Add the adapters' products to `out_TO`, the product of `x_TD` with the model's own matrix, in place."""
        for adapter, rows_R in self._rows:
            if parts := product[adapter]:
                x_RD = x_TD.index_select(0, rows_R)
                for part in parts:
                    part.add_to(x_RD, rows_R, out_TO)


class Adaptable(Protocol):
    """A model that supports adapters."""

    def adapt(self, lora: Lora) -> None: ...


def linears_of(model: nn.Module, layers_name: str) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linear modules in a model's layers, by name."""
    named = model.named_modules()
    found = {n: m for n, m in named if isinstance(m, nn.Linear) and n.startswith(f"{layers_name}.")}
    return {name: (module.out_features, module.in_features) for name, module in found.items()}


def bytes_of(adapters: Iterable[AdapterFiles], dtype: torch.dtype, rank_count: int) -> int:
    """Bytes of the adapters on each rank."""
    return sum(one.element_count(rank_count) for one in adapters) * dtype.itemsize


def _read(
    adapter: AdapterFiles, dtype: torch.dtype, device: torch.device, rank: int, rank_count: int
) -> dict[str, tuple[torch.Tensor, ...]]:
    """A rank's matrices (A, B) by module name, B multiplied by the scale before rounding."""
    found: dict[str, tuple[torch.Tensor, ...]] = {}
    with safe_open(adapter.folder / WEIGHTS, framework="pt") as opened:
        for module in adapter.ranks:
            a_rD = opened.get_tensor(adapter.key(module, "A"))
            b_Or = opened.get_tensor(adapter.key(module, "B")).to(torch.float64) * adapter.scale
            if divides_inputs(module):
                a_rD = a_rD.chunk(rank_count, dim=1)[rank]
            else:
                b_Or = b_Or.chunk(rank_count, dim=0)[rank]
            found[module] = a_rD.to(device, dtype).contiguous(), b_Or.to(device, dtype).contiguous()
    return found
