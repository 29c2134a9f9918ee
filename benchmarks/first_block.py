"""Time from a burst to the use of dropped layers' memory, simulated: `python -m benchmarks.first_block [--prompt
TOKENS]`.

Long answers fill nine tenths of the memory of two instances; then requests arrive at one instant, and demand is a tenth
above capacity. The program prints the milliseconds from that instant until the planner has decided on a drop, until a
member has adopted the new layout, and until its requests use the blocks gained.
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

_BURST_S = 29.0  # earliest time of the burst in the trace
_BURST_TOKENS = 15_360
_LOOK_S = 0.0005


class BlockDelays(NamedTuple):
    """Milliseconds from the burst to each event."""

    decided: float
    taken_up: float
    in_use: float

    def told(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {ms:.1f} ms" for name, ms in self._asdict().items())


def run(seed: int, model: str, cluster: str, prompt: int) -> BlockDelays | None:
    """Simulate one burst. None if dropped memory is not used within five seconds."""
    rng = random.Random(seed)
    at_s = _BURST_S + rng.random() / 2
    arrivals = [Arrival(i / 2, 1400, 4000) for i in range(40)]
    arrivals += [Arrival(at_s, prompt, 2000) for _ in range(_BURST_TOKENS // prompt)]
    rules = find_policy("drop")(production_rules(WorkerSize()))
    options = WorldOptions(
        model=find_model(model),
        cluster=find_cluster(cluster),
        timings=timings(),
        rules=rules,
        seed=seed,
        stop_after_s=at_s + 5.0,
    )
    world = World(options, arrivals)
    found = dict[str, float]()

    def look() -> None:
        now_s = world.clock.now_s - world.zero_s - at_s
        if now_s < 0.0:
            found["blocks"] = max(instance.load().block_count for instance in world.instances.values())
            return
        places = [instance.member.place for instance in world.instances.values()]
        seen = {
            "decided": world.planner.core.conductor.busy,
            "taken_up": any(place is not None and len(place.group.members) > 1 for place in places),
            "in_use": max(i.load().block_count for i in world.instances.values()) > found["blocks"],
        }
        for name in [name for name, is_so in seen.items() if is_so]:
            found.setdefault(name, now_s * 1e3)

    world.clock.every(_LOOK_S, b"look", look, first_s=world.zero_s + at_s - 2 * _LOOK_S - world.clock.now_s)
    world.run()
    stamps = [found.get(name) for name in BlockDelays._fields]
    known = [stamp for stamp in stamps if stamp is not None]
    return BlockDelays(*known) if len(known) == len(stamps) else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen2.5-14B")
    parser.add_argument("--cluster", default="2xA100-40G")
    parser.add_argument("--prompt", type=int, default=640, metavar="TOKENS", help="length of each prompt in the burst")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    found = [run(seed, args.model, args.cluster, args.prompt) for seed in range(args.seeds)]
    for seed, delays in enumerate(found):
        print(f"seed {seed}: {'no drop' if delays is None else delays.told()}")
    known = [one for one in found if one is not None]
    if not known:
        return 1
    print(f"median: {BlockDelays(*map(median, zip(*known, strict=True))).told()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
