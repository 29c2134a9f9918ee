"""What a GPU is asked before it serves, on the CPU: which steps are run, and what is made of the memory they took."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.engine import load
from services.worker.engine.load import MemoryNeeds, beside
from services.worker.engine.model_config import read_model_config
from services.worker.engine.packing import PackedStep
from services.worker.engine.parameters import end_parameters, layer_parameters, part_specs
from services.worker.engine.rehearsal import Largest, fitting_budget
from services.worker.memory.host import HostBackend
from services.worker.memory.kv_cache import KvShape

LONGEST, LARGEST = 64, Largest(tokens=150, sequences=9)
BESIDE_BYTES = 7 << 20


class Meter:
    total_bytes = 100 << 20

    def __init__(self) -> None:
        self._free = iter([50 << 20, (50 << 20) - BESIDE_BYTES])

    def free_bytes(self) -> int:
        return next(self._free)


class Recorded:
    """An attention backend that keeps what it was asked to prepare."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.steps: list[PackedStep] = []

    def prepare(self, step: PackedStep) -> Any:
        self.steps.append(step)
        return self._inner.prepare(step)


def needs_of(model_dir: Path) -> MemoryNeeds:
    config = read_model_config(model_dir)
    return MemoryNeeds(
        layers=[part_specs(layer_parameters(config, i), torch.float32) for i in range(config.layer_count)],
        others={name: part_specs(part, torch.float32) for name, part in end_parameters(config).items()},
        kv_shape=KvShape(
            layer_count=config.layer_count,
            block_tokens=16,
            kv_heads=config.kv_head_count,
            head_dim=config.head_dim,
            dtype=torch.float32,
        ),
    )


def test_the_largest_steps_of_both_kinds_are_run_and_what_they_took_is_told(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Recorded] = []
    inner = load._attention

    def attention(*given: Any) -> Recorded:
        recorded.append(Recorded(inner(*given)))
        return recorded[-1]

    monkeypatch.setattr(load, "_attention", attention)
    config = read_model_config(model_dir)
    told = beside(HostBackend(), Meter(), needs_of(model_dir), config, LONGEST, LARGEST)
    assert told == BESIDE_BYTES
    chunks, decodes = recorded[0].steps  # one of each variant of the kernel, as large as it gets
    assert (chunks.row_count, chunks.decode_count, len(chunks.chunks)) == (150, 0, 3)
    assert (decodes.row_count, decodes.decode_count) == (9, 9)
    assert set(decodes.decode_contexts_S) == {LONGEST}  # where contexts are split, these are


def test_parameters_and_kv_get_what_the_largest_steps_leave_of_the_share() -> None:
    assert fitting_budget(Meter(), 0.9, BESIDE_BYTES) == (90 << 20) - BESIDE_BYTES
