"""From a burst to the first block of dropped memory in use, in virtual time: `python -m benchmarks.first_block`.

Long answers fill nine tenths of the memory of two instances; then 24 requests come at one instant, and more is wanted
than there is. Said are the milliseconds from that instant until the planner has decided on a drop, and until a member
has blocks in place of layers.
"""

import argparse
import random
import sys
from statistics import median
from typing import NamedTuple

from sim.clients import Arrival
from sim.hardware import find_cluster, find_model, timings
from sim.jobs.simulation import WorkerSize, production_rules
from sim.policies import find_policy
from sim.world import World, WorldOptions

_BURST_S = 29.0  # of the trace's time
_LOOK_S = 0.0005


class Delays(NamedTuple):
    """Milliseconds since the burst."""

    decided: float
    in_use: float


def run(seed: int, model: str, cluster: str) -> Delays | None:
    """None: nothing was dropped within seconds."""
    rng = random.Random(seed)
    before = [Arrival(i / 2, 1400, 4000) for i in range(40)]
    at_s = _BURST_S + rng.random() / 2
    burst = [Arrival(at_s, 640, 2000) for _ in range(24)]
    rules = find_policy("drop")(production_rules(WorkerSize()))
    world = World(
        WorldOptions(
            model=find_model(model),
            cluster=find_cluster(cluster),
            timings=timings(),
            rules=rules,
            seed=seed,
            stop_after_s=at_s + 5.0,
        ),
        [*before, *burst],
    )
    found = dict[str, float]()
    whole = 0

    def look() -> None:
        nonlocal whole
        now_s = world.clock.now_s - world.zero_s - at_s
        blocks = sum(instance.load().block_count for instance in world.instances.values())
        if now_s < 0.0:
            whole = blocks
            return
        if world.planner.core.conductor.busy:
            found.setdefault("decided", now_s * 1e3)
        if blocks > whole:
            found.setdefault("in_use", now_s * 1e3)

    world.clock.every(_LOOK_S, b"look", look, first_s=world.zero_s + at_s - 2 * _LOOK_S - world.clock.now_s)
    world.run()
    return Delays(**found) if len(found) == len(Delays._fields) else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen2.5-14B")
    parser.add_argument("--cluster", default="2xA100-40G")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    found = [run(seed, args.model, args.cluster) for seed in range(args.seeds)]
    for seed, delays in enumerate(found):
        said = "no drop" if delays is None else f"decided {delays.decided:.1f} ms, in use {delays.in_use:.1f} ms"
        print(f"seed {seed}: {said}")
    known = [one for one in found if one is not None]
    if not known:
        return 1
    print(f"median: decided {median(d.decided for d in known):.1f} ms, in use {median(d.in_use for d in known):.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
