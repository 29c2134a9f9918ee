"""Interface of model implementations: Ballast's own classes, or the modelling code of `transformers`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

import torch

from services.worker.engine.attention import AttentionBackend, AttentionStep, CpuAttention
from services.worker.engine.attention_cuda import CudaAttention
from services.worker.engine.attention_flashinfer import FlashInferAttention
from services.worker.engine.checkpoint import Checkpoint, load_parameters
from services.worker.engine.layer_attention import LayerKind
from services.worker.engine.lora_files import Linears, own_linears
from services.worker.engine.model import Model
from services.worker.engine.model_config import ModelConfig, ModelFacts
from services.worker.engine.native.library import Kernels
from services.worker.engine.packed_attention import PagedAttention
from services.worker.engine.packed_model import PackedModel
from services.worker.engine.parameters import (
    ParameterLayout,
    end_parameters,
    layer_parameters,
    layout_for,
    parameter_count,
    part_specs,
)
from services.worker.engine.peers import Peers
from services.worker.engine.products import InvariantProducts, linear
from services.worker.memory.backend import MemoryBackend
from services.worker.memory.device import DeviceMemory
from services.worker.memory.kv_cache import KvCache, KvShape
from services.worker.memory.parameters import ParameterStore, PartSpec, lay_out


class StageModel(Protocol):
    """A model that can execute ranges of its layers, so that several stages share it. One step at a time."""

    @property
    def layer_count(self) -> int: ...

    def reserve(self, rows: int) -> None:
        """Size the buffers for `rows` rows. Where graphs are recorded, they keep their addresses from then on."""
        ...

    def embed(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Input of the first layer: hidden states [T, D] in fresh memory. First stage only."""
        ...

    def run_layers(
        self,
        hidden_TD: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionStep,
        *,
        first_layer: int,
        last_layer: int,
    ) -> torch.Tensor:
        """Apply the layers `[first_layer, last_layer)`. The result may or may not share memory with `hidden_TD`."""
        ...

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] from hidden states after the last layer. Last stage only."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Device memory needed by a model."""

    layers: Sequence[PartSpec]
    others: Mapping[str, PartSpec]
    kv_shape: KvShape

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        layout: ParameterLayout,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        block_tokens: int,
    ) -> Self:
        return cls(
            layers=[part_specs(layer_parameters(config, i, layout), dtype) for i in range(config.layer_count)],
            others={name: part_specs(part, dtype) for name, part in end_parameters(config, layout).items()},
            kv_shape=KvShape(
                layer_count=config.layer_count,
                block_tokens=block_tokens,
                kv_heads=config.kv_head_count,
                head_dim=config.head_dim,
                dtype=kv_dtype,
            ),
        )

    def open(self, backend: MemoryBackend, budget_bytes: int) -> DeviceMemory:
        return DeviceMemory.open(
            backend, budget_bytes=budget_bytes, layers=self.layers, others=self.others, kv_shape=self.kv_shape
        )

    def least_bytes(self, granularity_bytes: int, block_count: int) -> int:
        """Bytes for all parameters and `block_count` blocks, including what rounding to whole extents wastes."""
        layers = [lay_out(f"layers.{i}", specs).size_bytes for i, specs in enumerate(self.layers)]
        others = [lay_out(name, specs).size_bytes for name, specs in self.others.items()]
        kv_bytes = self.kv_shape.layer_count * block_count * self.kv_shape.block_bytes
        lost_bytes = (2 * len(layers) + len(others)) * (max(layers) // 8 + 2 * granularity_bytes)
        return sum(layers) + sum(others) + kv_bytes + lost_bytes


class Implementation(Protocol):
    """A model computed in one dtype on one device."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> ModelFacts: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def kinds(self) -> Sequence[LayerKind]:
        """Kind of attention of each layer; empty if all layers have plain attention."""
        ...

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the whole model, over all ranks."""
        ...

    @property
    def linears(self) -> Linears:
        """Linear modules that LoRA adapters can modify."""
        ...

    @property
    def quantised(self) -> str | None:
        """Number format of parameters that stay quantised in memory, if any."""
        ...

    @property
    def pipelines(self) -> bool:
        """True if ranges of layers can run on different workers. Known once `check` has run."""
        ...

    def needs(self, block_tokens: int) -> MemoryNeeds: ...

    def load(self, memory: DeviceMemory, compute_here: Callable[[], None]) -> None:
        """Fill every parameter from the checkpoint and take the layers' checksums.

        Raises:
            ConfigError: the checkpoint does not match its config.json.
        """
        ...

    def read_layer(self, store: ParameterStore, layer: int) -> None:
        """Reload a layer's parameters from the checkpoint, on all ranks. Callable from any thread."""
        ...

    def assemble(
        self, memory: DeviceMemory, kernels: Kernels | None, longest: int
    ) -> tuple[StageModel, AttentionBackend]:
        """Build the model on its memory, which need not be filled yet, for contexts of up to `longest` tokens."""
        ...

    def check(self, model: StageModel, attention: AttentionBackend, kv: KvCache) -> None:
        """Verify that the loaded model matches the checkpoint. The cache must not be in use yet.

        Raises:
            ConfigError: it does not match.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BallastModel:
    """An `Implementation` with Ballast's own model classes; fused matrices (qkv, gate and up) are padded or packed."""

    model_dir: Path
    config: ModelConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: str
    kernels: Kernels | None
    peers: Peers | None
    attention_backend: str
    whole: ModelConfig  # of the whole model, over all ranks
    batch_invariant: bool = False  # on a GPU: products do not depend on the other rows of a step

    @property
    def name(self) -> str:
        return "ballast"

    @property
    def kinds(self) -> Sequence[LayerKind]:
        return ()

    @property
    def parameter_count(self) -> int:
        return parameter_count(self.whole)

    @property
    def linears(self) -> Linears:
        return own_linears(self.whole)

    @property
    def quantised(self) -> str | None:
        return None

    @property
    def pipelines(self) -> bool:
        return True

    def needs(self, block_tokens: int) -> MemoryNeeds:
        return MemoryNeeds.of(self.config, self._layout, self.dtype, self.kv_dtype, block_tokens)

    def load(self, memory: DeviceMemory, compute_here: Callable[[], None]) -> None:
        load_parameters(self.model_dir, self.config, memory.parameters, self._layout, self.kernels, compute_here)

    def read_layer(self, store: ParameterStore, layer: int) -> None:
        with Checkpoint(self.model_dir, self.kernels) as checkpoint:

            def fill(rank: int, one: ParameterStore) -> None:
                config = self.config if one is store else replace(self.config, rank=rank)
                checkpoint.fill(layer_parameters(config, layer, self._layout), one.layer(layer))

            store.fill(layer, fill)

    def assemble(
        self, memory: DeviceMemory, kernels: Kernels | None, longest: int
    ) -> tuple[StageModel, AttentionBackend]:
        if kernels is not None:
            packed = PackedModel(self.config, memory.parameters, memory.kv, kernels, max_model_len=longest)
            return packed, PagedAttention(kernels)
        sum_over_ranks = None if self.peers is None else self.peers.sum
        model = Model(
            self.config,
            memory.parameters,
            memory.kv,
            max_model_len=longest,
            sum_over_ranks=sum_over_ranks,
            products=InvariantProducts() if self.batch_invariant else linear,
        )
        device, kv_dtype = memory.pool.backend.device, memory.kv.shape.dtype
        return model, own_attention(device, self.config, self.dtype, kv_dtype, self.attention_backend)

    def check(self, model: StageModel, attention: AttentionBackend, kv: KvCache) -> None:
        """No-op, since tests compare these classes with `transformers`."""

    @property
    def _layout(self) -> ParameterLayout:
        return layout_for(self.device, self.kernels)


def own_attention(
    device: torch.device, config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, name: str
) -> AttentionBackend:
    heads = (config.head_count, config.kv_head_count, config.head_dim)
    if device.type != "cuda":
        return CpuAttention(*heads, dtype)
    if name == "flashinfer":
        return FlashInferAttention(*heads, dtype, device)
    return CudaAttention(*heads, dtype, device, kv_dtype=kv_dtype)
