"""Steps that are recorded, and replayed over drops and restores."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ballast.common.errors import ConfigError
from ballast.model.tiny import make_tiny
from services.worker.engine import load
from services.worker.engine.attention_cuda import CudaAttention
from services.worker.engine.load import load_engine
from services.worker.engine.model_config import ModelConfig
from services.worker.engine.rehearsal import Largest
from tests.support.engine import Job, generate

pytest.importorskip("triton")


def test_replays_use_what_was_recorded_and_nothing_is_recorded_anew_after_a_drop() -> None:
    """In a process of its own: Triton decides when it is imported whether it compiles or interprets."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.worker.engine.replayed_graphs"]
    subprocess.run(command, check=True, timeout=200, env=os.environ | {"TRITON_INTERPRET": "1"})


def test_a_device_that_does_not_record_is_told_with_what_to_set(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(device: torch.device, config: ModelConfig, dtype: torch.dtype, name: str) -> CudaAttention:
        return CudaAttention(config.head_count, config.kv_head_count, config.head_dim, dtype, device)

    def refuse(launch: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(load, "_attention", attention)
    monkeypatch.setattr(load, "recorder", lambda device: refuse)  # pyright: ignore[reportUnknownLambdaType]
    largest = Largest(tokens=8, sequences=2)
    with pytest.raises(ConfigError, match=r"enforce_eager: has to be set here: layer 0 with 2 rows .* not permitted"):
        load_engine(model_dir, device_memory_bytes=8 << 20, kernels="torch", largest=largest)
    load_engine(model_dir, device_memory_bytes=8 << 20, kernels="torch", largest=largest, enforce_eager=True).close()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_on_the_device_a_drop_and_a_restore_change_no_token_of_graphs(tmp_path: Path, dtype: str) -> None:
    model_dir = make_tiny("qwen3", tmp_path / "model", seed=7, layers=4)
    chosen: list[list[list[int]]] = []
    for enforce_eager in (True, False):
        with load_engine(
            model_dir,
            dtype=dtype,
            device_memory_bytes=256 << 20,
            device="cuda",
            largest=Largest(tokens=64, sequences=8),
            enforce_eager=enforce_eager,
        ) as engine:
            blocks = engine.block_count
            for dropped in ((), (2, 3)):
                if dropped:
                    engine.memory.drop_layers(dropped)
                    engine.memory.make_room_for_layers(dropped, block_count=blocks)
                for layer in dropped:
                    engine.read_layer(layer)
                jobs = [Job(i, tuple(range(3, 3 + length)), 16) for i, length in enumerate((1, 15, 64, 200))]
                generate(engine, jobs, chunk_tokens=64)
                chosen.append([job.chosen for job in jobs])
    eager, eager_after, recorded, recorded_after = chosen
    assert (eager_after, recorded_after) == (eager, recorded)
    if dtype == "float32":  # a recording has more rows, with which a product may round otherwise
        assert recorded == eager
