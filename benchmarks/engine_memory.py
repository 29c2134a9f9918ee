"""What an engine holds beside its budget, and what a layer takes to come back, with both kinds of kernels.

    python -m benchmarks.engine_memory

A process for each kind loads the model, then steps with 32 numbers of rows up to 512, twice. What is counted is private
memory: the budget lies in shared memory. The compiled kernels are to grow by less than torch's, hardly at all the
second time, and to read a layer from the checkpoint, packing included, in no more processor time. The exit status says
whether that is so.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from ballast.common.sampling import SamplingParams
from ballast.model.tiny import make_preset
from services.worker.core.batch import Batch, NewSequence, Slice
from services.worker.engine.load import Engine, load_engine

ROWS, EVERY = 512, 16
READS = 5
LITTLE_BYTES = 4 << 20


def private_bytes() -> int:
    found = psutil.Process().memory_info()
    return found.rss - found.shared


def step_with_all_sizes(engine: Engine) -> None:
    table = tuple(range(-(-ROWS // engine.block_tokens)))
    for rows in range(1, ROWS + 1, EVERY):
        sequence = NewSequence(rows, (7,) * rows, (), SamplingParams(temperature=0.0))
        engine.step(Batch(rows, (), (sequence,), (Slice(rows, 0, (7,) * rows, True),)), [table])
        engine.step(Batch(rows, (rows,), (), ()), [])


def measure(model: Path, kernels: str) -> dict[str, float]:
    torch.set_num_threads(1)
    with load_engine(model, dtype="float32", device_memory_bytes=1 << 28, kernels=kernels) as engine:
        sizes = [private_bytes()]
        for _ in range(2):
            step_with_all_sizes(engine)
            sizes.append(private_bytes())
        reads_s: list[float] = []
        for _ in range(READS):
            started_s = time.process_time()
            engine.read_layer(0)
            reads_s.append(time.process_time() - started_s)
    grown = [later - earlier for earlier, later in itertools.pairwise(sizes)]
    return {"loaded": sizes[0], "first": grown[0], "second": grown[1], "read_s": min(reads_s)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs=2, metavar=("MODEL", "KERNELS"), help=argparse.SUPPRESS)
    only: list[str] | None = parser.parse_args().only
    if only is not None:
        print(json.dumps(measure(Path(only[0]), only[1])))
        return 0
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder:
        model = make_preset("bench", Path(folder) / "model")
        for kernels in ("native", "torch"):
            command = [sys.executable, "-m", "benchmarks.engine_memory", "--only", str(model), kernels]
            found[kernels] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    print("| kernels | private when loaded, MiB | grown by 32 sizes, MiB | again, MiB | a layer read, ms |")
    print("|---|---|---|---|---|")
    for kernels, each in found.items():
        sizes = " | ".join(f"{each[name] / 2**20:.1f}" for name in ("loaded", "first", "second"))
        print(f"| {kernels} | {sizes} | {each['read_s'] * 1e3:.1f} |")
    native, plain = found["native"], found["torch"]
    good = {
        "grows by less than with torch's": native["first"] + native["second"] < plain["first"] + plain["second"],
        "does not grow a second time": native["second"] < LITTLE_BYTES,
        "a layer is read as fast": native["read_s"] <= plain["read_s"],
    }
    print("", *(f"- {what}: {'yes' if so else 'NO'}" for what, so in good.items()), sep="\n")
    return 0 if all(good.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
