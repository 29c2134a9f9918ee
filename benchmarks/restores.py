"""Seconds of a restore with layers from the other worker over TCP, from the host copy, and from the checkpoint.

python -m benchmarks.restores --mib 1024

Two workers without load drop half of their layers each and restore them, with `--host-copy` off and auto in turn. The
checkpoint is read, and verified, by one engine in this process: its file is in the page cache, so it is the best case.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from ballast.rpc.channel import open_channel
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from services.worker.engine.load import load_engine
from tools.local.cluster import LocalCluster, Service
from tools.model.tiny import make_tiny

_LAYERS, _HIDDEN, _BYTES = 16, 1024, 4
_ATTENTION = 4 * _HIDDEN * _HIDDEN  # parameters of a layer's attention
_ENDS_S = 120.0


def _make(folder: Path, mib: int) -> Path:
    """Make a checkpoint of a Llama whose layers take about `mib` MiB."""
    mlp = (mib << 20) // (_LAYERS * _BYTES) - _ATTENTION
    intermediate = mlp // (3 * _HIDDEN * 16) * 16
    out = folder / "model"
    return make_tiny("llama", out, hidden=_HIDDEN, layers=_LAYERS, heads=8, kv_heads=8, intermediate=intermediate)


async def _ended(planner: "planner_pb2_grpc.PlannerServiceAsyncStub", epoch: int) -> pb.Transition:
    async with asyncio.timeout(_ENDS_S):
        while True:
            listed = await planner.ListTransitions(pb.ListTransitionsRequest(), timeout=10)
            found = next((one for one in listed.transitions if one.epoch == epoch), None)
            if found is not None and found.phase in ("done", "aborted"):
                if found.phase == "aborted":
                    raise SystemExit(found.summary)
                return found
            await asyncio.sleep(0.05)


async def _restores(model: Path, memory_bytes: int, setting: str, rounds: int) -> list[float]:
    """Seconds until both workers had all layers, for each restore."""
    flags: dict[Service, list[str]] = {
        "worker": ["--host-copy", setting],
        "planner": ["--overload-policy", "recompute"],
    }
    took_s = list[float]()
    async with LocalCluster(model, workers=2, device_memory_bytes=memory_bytes, flags=flags) as cluster:
        channel = open_channel(cluster.processes["planner"][0].address)
        planner = planner_pb2_grpc.PlannerServiceStub(channel)
        for number in range(rounds):
            drop = pb.DropRequest(worker_ids=["worker-0", "worker-1"], request_id=f"drop-{number}")
            await _ended(planner, (await planner.Drop(drop, timeout=60)).epoch)
            begun = await planner.Restore(pb.RestoreRequest(request_id=f"restore-{number}"), timeout=60)
            took_s.append((await _ended(planner, begun.epoch)).layers_s)
        await channel.close()
    return took_s


def _from_checkpoint(model: Path, memory_bytes: int, rounds: int) -> list[float]:
    """Seconds to read and verify half of the layers, one after the other, for each round."""
    took_s = list[float]()
    with load_engine(model, device_memory_bytes=memory_bytes) as engine:
        layers = range(_LAYERS // 2)
        for _ in range(rounds):
            engine.memory.drop_layers(layers)
            engine.memory.make_room_for_layers(layers, block_count=0)
            began_s = time.perf_counter()
            for layer in layers:
                engine.read_layer(layer)
                engine.memory.parameters.layer_checksum(layer)
            took_s.append(time.perf_counter() - began_s)
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the layers (default: 1024)")
    parser.add_argument("--rounds", type=int, default=3, help="restores of each kind, in each of two rounds (3)")
    options = parser.parse_args()
    took_s: dict[str, list[float]] = {"peers": [], "host copy": [], "checkpoint": []}
    with tempfile.TemporaryDirectory() as folder:
        model, memory_bytes = _make(Path(folder), options.mib), options.mib << 21
        for turn in (1, 2):
            print(f"turn {turn} of 2: peers, host copy, checkpoint ...", file=sys.stderr, flush=True)
            took_s["peers"] += asyncio.run(_restores(model, memory_bytes, "off", options.rounds))
            took_s["host copy"] += asyncio.run(_restores(model, memory_bytes, "auto", options.rounds))
            took_s["checkpoint"] += _from_checkpoint(model, memory_bytes, options.rounds)
    told = {
        name: {"median_s": round(statistics.median(seconds), 2), "all_s": [round(one, 2) for one in seconds]}
        for name, seconds in took_s.items()
    }
    print(json.dumps({"mib_of_each_worker": options.mib // 2, "restore": told}, indent=2))


if __name__ == "__main__":
    main()
