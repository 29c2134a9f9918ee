"""An engine that has only the sizes of a model: memory without contents is accounted and remapped as usual."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from ballast.common.errors import ConfigError
from ballast.common.load import MemoryReport
from ballast.common.model import ModelInfo
from ballast.service.logs import get_logger
from services.worker.core.batch import Batch, StepResult
from services.worker.emulation.machine import Machine, Outline
from services.worker.emulation.phantom import PhantomBackend, dtype, phantom
from services.worker.emulation.runner import WEIGHTS, EmulatedRunner, layer_mark
from services.worker.memory.backend import MemoryBackend
from services.worker.memory.device import DeviceMemory
from services.worker.memory.host_copy import HostCopy
from services.worker.memory.kv_cache import KvShape
from services.worker.memory.parameters import TensorSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class EmulatedEngine:
    """The emulated counterpart of `engine.load.Engine`."""

    info: ModelInfo
    machine: Machine
    memory: DeviceMemory
    runner: EmulatedRunner
    host_copy: HostCopy = field(default_factory=lambda: HostCopy(_copied, _copy))

    @property
    def block_count(self) -> int:
        return self.memory.kv.block_count

    def compute_here(self) -> None:
        """Does nothing."""

    def step(self, batch: Batch, block_tables: Sequence[Sequence[int]]) -> StepResult:
        return self.runner.step(batch, block_tables)

    def holds_layer(self, layer: int) -> bool:
        return self.host_copy.holds(layer)

    def read_layer(self, layer: int) -> bool:
        """Read a layer's parameters from their copy in host memory, if any (True), or from the emulated disk
        (False).
        """
        if self.host_copy.fill(self.memory.parameters, layer):
            self._wait_for_host()
            return True
        weights = self.memory.parameters.layer(layer)[WEIGHTS]
        time.sleep(self.machine.model.layer_parameter_bytes / self.machine.disk_bytes_per_s)
        phantom(weights).write([layer_mark(layer)])
        return False

    def keep_layer(self, layer: int) -> None:
        self.host_copy.keep(self.memory.parameters, layer)
        self._wait_for_host()

    def _wait_for_host(self) -> None:
        time.sleep(self.machine.model.layer_parameter_bytes / self.machine.host_bytes_per_s)

    def memory_report(self) -> MemoryReport:
        return self.memory.report()

    def check(self) -> None:
        self.memory.check()

    def close(self) -> None:
        """Close the memory, and log by how much steps were late."""
        clock = self.runner.clock
        due_s, late_s, lost_s = (round(seconds, 3) for seconds in (clock.due_s, clock.late_s, clock.lost_s))
        get_logger().info("emulated", due_s=due_s, late_s=late_s, lost_s=lost_s)
        self.memory.close()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return cast("torch.Tensor", phantom(tensor).clone())


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    phantom(target).write(phantom(source).read())


def emulate(
    machine: Machine,
    *,
    device_memory_bytes: int | None = None,
    block_tokens: int = 16,
    max_model_len: int | None = None,
    name: str | None = None,
    kv_cache_dtype: str = "auto",
) -> EmulatedEngine:
    """Create the engine of an emulated machine. Raises ConfigError if the model exceeds the memory, or `max_model_len`
    exceeds the model's limit.
    """
    model = machine.model
    element, kind = dtype(model.dtype), model.dtype
    longest = model.max_model_len if max_model_len is None else max_model_len
    if longest > model.max_model_len:
        raise ConfigError("max_model_len", f"must be at most {model.max_model_len}, the model's limit, got {longest}")
    shape = KvShape(
        layer_count=model.layer_count,
        block_tokens=block_tokens,
        kv_heads=1,
        head_dim=model.kv_elements_per_token_layer // 2,
        dtype=element if kv_cache_dtype == "auto" else dtype("float8_e4m3fn"),
    )
    backend = PhantomBackend(shape.block_bytes, machine.remap_s_per_byte)
    memory = DeviceMemory.open(
        cast(MemoryBackend, backend),
        budget_bytes=device_memory_bytes or machine.memory_bytes,
        layers=[{WEIGHTS: TensorSpec((model.layer_parameter_bytes // element.itemsize,), element)}] * model.layer_count,
        others={"ends": {WEIGHTS: TensorSpec((model.other_parameter_bytes // element.itemsize,), element)}},
        kv_shape=shape,
    )
    runner = EmulatedRunner(machine, memory)
    for layer in range(model.layer_count):
        phantom(memory.parameters.layer(layer)[WEIGHTS]).write([layer_mark(layer)])
    backend.takes_time = True
    info = _info(model, memory, longest, name or model.name, kind)
    if kv_cache_dtype != "auto":
        info = replace(info, kv_cache_dtype="fp8_e4m3")
    return EmulatedEngine(info, machine, memory, runner)


def _info(model: Outline, memory: DeviceMemory, longest: int, name: str, kind: str) -> ModelInfo:
    layer_bytes = tuple(memory.parameters.size_bytes_of(i) for i in range(model.layer_count))
    return ModelInfo(
        name=name,
        architecture=model.architecture,
        layer_count=model.layer_count,
        vocab_size=model.vocab_size,
        max_model_len=longest,
        dtype=kind,
        parameter_count=model.parameter_count,
        kv_bytes_per_token=memory.kv.geometry.kv_bytes_per_token,
        eos_token_ids=(),
        layer_parameter_bytes=layer_bytes,
        other_parameter_bytes=memory.parameters.other_bytes,
        block_bytes=memory.kv.shape.block_bytes,
    )
