"""Steps that are recorded, and replayed over drops and restores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ballast.model.tiny import make_tiny
from services.worker.engine.load import load_engine
from services.worker.engine.rehearsal import Largest
from tests.support.engine import Job, generate

pytest.importorskip("triton")


def test_replays_use_what_was_recorded_and_nothing_is_recorded_anew_after_a_drop() -> None:
    """In a process of its own: Triton decides when it is imported whether it compiles or interprets."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.worker.engine.replayed_graphs"]
    subprocess.run(command, check=True, timeout=200, env=os.environ | {"TRITON_INTERPRET": "1"})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_on_the_device_graphs_give_the_same_tokens_before_and_after_a_drop(tmp_path: Path, dtype: str) -> None:
    model_dir = make_tiny("qwen3", tmp_path / "model", seed=7, layers=4)
    chosen: list[list[list[int]]] = []
    for eager in (True, False):
        with load_engine(
            model_dir,
            dtype=dtype,
            device_memory_bytes=256 << 20,
            device="cuda",
            largest=Largest(tokens=64, sequences=8),
            enforce_eager=eager,
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
    assert chosen == [chosen[0]] * 4
