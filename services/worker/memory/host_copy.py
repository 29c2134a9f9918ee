"""Copies of layers' parameters in host memory. They are made once, because parameters never change."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING

from services.worker.memory.parameters import ParameterStore, layer_name

if TYPE_CHECKING:
    import torch

    from services.worker.memory.shared_copy import SharedCopy


class HostCopy:
    """Copies of layers in host memory. Several threads may use it concurrently for different layers."""

    def __init__(
        self,
        copied: Callable[[torch.Tensor], torch.Tensor],
        copy: Callable[[torch.Tensor, torch.Tensor], None],
        shared: SharedCopy | None = None,
    ) -> None:
        """`copied(tensor)` returns a copy in host memory; `copy(to, from)` copies back. `shared`: a copy shared by all
        workers of this host, used instead of a private one.
        """
        self._shared = shared
        self._copied = copied
        self._copy = copy
        self._layers: dict[int, list[torch.Tensor]] = {}
        self._lock = Lock()

    def keep(self, parameters: ParameterStore, layer: int) -> None:
        """Copy a layer of all ranks to the host, unless it has already been copied."""
        if not self.holds(layer):
            tensors = [self._copied(tensor) for tensor in parameters.pieces(layer)]
            with self._lock:
                self._layers[layer] = tensors

    def holds(self, layer: int) -> bool:
        with self._lock:
            return layer in self._layers or self._shared is not None

    def fill(self, parameters: ParameterStore, layer: int) -> bool:
        """Copy a layer back. Returns False if there is no copy."""
        if self._shared is not None:
            return self._shared.fill(layer_name(layer), parameters.pieces(layer))
        with self._lock:
            tensors = self._layers.get(layer)
        if tensors is None:
            return False
        for target, source in zip(parameters.pieces(layer), tensors, strict=True):
            self._copy(target, source)
        return True

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
