"""What deciding about a drop costs, and how far figure 6 is from the least cost of stages.

    python -m benchmarks.planner

First table: processor time of a whole plan (grouping, layer split, memory of every member), the least of several runs,
for 32 layers. Second table: cost of figure 6's plan above that of the least possible one, in percent, by the share of
copies that must go (of N copies all but one can); identical loads, and the mean over random loads.
"""

import random
import time
from collections.abc import Sequence

from ballast.common.ids import GroupId, WorkerId
from services.planner.policy.drop import DropPlan, Method, plan
from services.planner.policy.snapshot import GroupState, InstanceState, ModelShape, Snapshot

LAYERS = 32
MODEL = ModelShape(
    layer_parameter_bytes=(400 << 20,) * LAYERS,
    other_parameter_bytes=1 << 30,
    block_tokens=16,
    block_bytes=64 << 10,
    extent_bytes=2 << 20,
)
BUDGET_BYTES = 24 << 30
NEEDS = (0.1, 0.3, 0.6, 0.9)


def cluster(count: int, used: Sequence[int]) -> Snapshot:
    blocks = MODEL.block_count(BUDGET_BYTES, 0, LAYERS)
    layers = tuple(range(LAYERS))
    groups = (
        GroupState(
            GroupId(f"w{i:05d}"),
            (InstanceState(WorkerId(f"w{i:05d}"), BUDGET_BYTES, 0, LAYERS, layers),),
            blocks,
            used[i],
            0,
        )
        for i in range(count)
    )
    return Snapshot(MODEL, tuple(groups))


def identical(count: int) -> Snapshot:
    return cluster(count, [100] * count)


def differing(count: int, seed: int) -> Snapshot:
    rng = random.Random(seed)
    return cluster(count, [rng.randrange(1, 5000) for _ in range(count)])


def needed_bytes(count: int, share: float) -> int:
    return round(share * (count - 1)) * MODEL.copy_bytes


def timed(snapshot: Snapshot, share: float, method: Method) -> tuple[float, DropPlan]:
    """Milliseconds of processor time and the plan."""
    needed = needed_bytes(len(snapshot.groups), share)
    best_ms, done = float("inf"), plan(snapshot, needed, method)
    for _ in range(5 if len(snapshot.groups) < 5000 else 2):
        begin_s = time.process_time()
        done = plan(snapshot, needed, method)
        best_ms = min(best_ms, (time.process_time() - begin_s) * 1e3)
    return best_ms, done


def times() -> None:
    print("ms for a plan                  " + "".join(f"{share:>16.0%}" for share in NEEDS))
    for count in (2, 16, 64, 128, 1000, 10_000):
        for kind, snapshot in (("identical", identical(count)), ("differing", differing(count, 1))):
            for method in (Method.AUTO, Method.FIGURE6):
                cells = [timed(snapshot, share, method) for share in NEEDS]
                row = "".join(f"{f'{done.method} {took_ms:.2f}':>16}" for took_ms, done in cells)
                print(f"{count:6d} {kind}  {method:12s}{row}")


def excess_percent(snapshot: Snapshot, share: float) -> float:
    needed = needed_bytes(len(snapshot.groups), share)
    best, greedy = plan(snapshot, needed), plan(snapshot, needed, Method.FIGURE6)
    assert best.is_optimal
    assert best.freed_bytes == greedy.freed_bytes
    return 100.0 * (greedy.cost_after / best.cost_after - 1.0) if best.cost_after else 0.0


def gaps() -> None:
    shares = [tenth / 10 for tenth in range(1, 10)]
    print("\nfigure 6 above the least, %" + " " * 4 + "".join(f"{share:>8.0%}" for share in shares))
    for count in (2, 4, 8, 16, 32, 64):
        print(
            f"{count:6d} identical" + " " * 15 + "".join(f"{excess_percent(identical(count), s):8.1f}" for s in shares)
        )
        means = [sum(excess_percent(differing(count, seed), s) for seed in range(10)) / 10 for s in shares]
        print(f"{count:6d} differing" + " " * 15 + "".join(f"{mean:8.1f}" for mean in means))


def main() -> None:
    times()
    gaps()


if __name__ == "__main__":
    main()
