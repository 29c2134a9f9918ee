"""Costs and benefits of a host copy of the parameters: speed relative to memcpy, and memory of workers that share it.

python -m benchmarks.host_copy --mib 1024 --workers 8
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path

import torch

from services.worker.memory.shared_copy import Copied, Maker, open_copy

_LAYERS = 16
_ROUNDS = 5


def _shared_bytes() -> int:
    """Bytes of shared memory on this host, including /dev/shm."""
    found = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(found["Shmem"].split()[0]) * 1024


def _rate(size_bytes: int, seconds: list[float]) -> float:
    return round(size_bytes / statistics.median(seconds) / 1e9, 2)


def _use(root: Path, layer_bytes: int, ready: "Queue[float]", leave: Event) -> None:
    """Fill parameters from the copy, as a starting worker does, and put the processor time into `ready`."""
    target = torch.ones(layer_bytes, dtype=torch.uint8)
    begin_s = time.process_time()
    copy = open_copy(root, "benchmark")
    assert not isinstance(copy, Maker)
    assert all(copy.fill(f"layers.{layer}", [target]) for layer in range(_LAYERS))
    ready.put(time.process_time() - begin_s)
    leave.wait()
    copy.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the parameters (default: 1024)")
    parser.add_argument("--workers", type=int, default=8, help="workers that map the copy at once (8)")
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"), help="folder of the copy (default: /dev/shm)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    layer_bytes = (options.mib << 20) // _LAYERS
    size_bytes = layer_bytes * _LAYERS
    layers = [torch.randint(0, 255, (layer_bytes,), dtype=torch.uint8) for _ in range(_LAYERS)]
    target = torch.ones(layer_bytes, dtype=torch.uint8)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(dir=options.root) as folder:
        root, before_bytes = Path(folder), _shared_bytes()
        found = open_copy(root, "benchmark")
        assert isinstance(found, Maker)
        begin_s = time.process_time()
        with found as maker:
            copy = maker.make([Copied(f"layers.{i}", [layer], bytes(16)) for i, layer in enumerate(layers)])
        made_s = time.process_time() - begin_s
        assert copy is not None
        plain, summed = list[float](), list[float]()
        for _ in range(_ROUNDS):
            begin_s = time.process_time()
            for layer in layers:
                target.copy_(layer)
            plain.append(time.process_time() - begin_s)
            begin_s = time.process_time()
            for number in range(_LAYERS):
                assert copy.fill(f"layers.{number}", [target])
            summed.append(time.process_time() - begin_s)
        ready, leave = context.Queue(), context.Event()
        workers = [context.Process(target=_use, args=(root, layer_bytes, ready, leave)) for _ in range(options.workers)]
        for worker in workers:
            worker.start()
        took_s = [ready.get() for _ in workers]
        shared_bytes = _shared_bytes() - before_bytes
        leave.set()
        for worker in workers:
            worker.join()
        copy.close()
    copied, checked = _rate(size_bytes, plain), _rate(size_bytes, summed)
    told = {
        "parameter_mib": size_bytes >> 20,
        "memcpy_gb_per_s": copied,
        "from_the_copy_gb_per_s": checked,
        "of_memcpy": round(checked / copied, 2),
        "made_gb_per_s": round(size_bytes / made_s / 1e9, 2),
        "workers": options.workers,
        "start_of_a_worker_gb_per_s": _rate(size_bytes, took_s),
        "shared_memory_of_all_workers_mib": shared_bytes >> 20,
    }
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
