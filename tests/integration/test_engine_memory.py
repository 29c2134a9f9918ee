"""Memory that an engine's process retains after batches of every size."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.model.tiny import make_tiny

pytestmark = pytest.mark.rotating

_GROW = """
import random, sys
from pathlib import Path
import psutil
from services.worker.engine.load import load_engine
from tests.support.engine import Job, generate

me, rng = psutil.Process(), random.Random(1)
with load_engine(Path(sys.argv[1]), dtype="float32", device_memory_bytes=16 << 20) as engine:
    sizes = []
    for _ in range(8):
        for rows in rng.sample(range(2, 241), 239):
            generate(engine, [Job(1, (7,) * rows, 2)])
        sizes.append(me.memory_info().rss)
print(*(size - sizes[0] for size in sizes), sizes[0])
"""


def test_an_engine_stops_growing(tmp_path: Path) -> None:
    """Runs in a new process, since caches fill only once. Without limits, the 239 batch sizes would take 350 MiB."""
    model_dir = make_tiny("llama", tmp_path / "model", seed=3, layers=2, vocab=320, max_len=256)
    before = "import psutil, services.worker.engine.load; print(psutil.Process().memory_info().rss)"
    run = [
        subprocess.run([sys.executable, "-c", *a], capture_output=True, text=True, check=True, timeout=280)
        for a in ((before,), (_GROW, str(model_dir)))
    ]
    *growth, first = map(int, run[1].stdout.split())
    assert first - int(run[0].stdout) < 160 << 20
    # The memory that malloc retains between used blocks settles after four rounds, then varies by some 8 MiB.
    assert growth[7] - growth[3] < 24 << 20
