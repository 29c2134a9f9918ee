"""Whether dropping only as many layers as the requirement asks for would pay: every drop of simulated runs, looked at.

    python -m benchmarks.partial_drop [--scenarios longbench-14b sharegpt-14b ...] [--rate-scale 1.0 1.5]

A drop merges whole instances, so it frees a multiple of a copy of the model, and that is more than was asked for.
Instead members could keep layers in duplicate as long as the requirement is met. A victim's KV would stay where it is
in the layers that its member keeps, so the exchange would be smaller by the share of layers kept in duplicate. How
many these are depends on how KV is laid out:

- as today: a block id means the same slot in every layer of a stage. A stage that keeps more layers has fewer blocks,
  and requests of others take slots in its duplicates that nobody uses;
- at best: tables of its own for each layer, so that only those whose KV is there take slots in a duplicate.

What is saved is paid later, with a second transition, if demand goes on to exceed what the smaller drop has freed.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ballast.bench.scenarios import job_of
from ballast.bench.simulation import arrivals_of, specs_of
from ballast.common.transition import TransitionKind
from services.monitor.policy.pressure import Overload
from services.planner.core.record import TransitionRecord
from services.planner.policy.snapshot import ModelShape
from sim.results import SimRun
from sim.scenario import read_scenario
from sim.world import World, WorldOptions

SCENARIOS = Path(__file__).parent / "scenarios" / "kunserve"
NAMES = ("longbench-14b", "sharegpt-14b", "burstgpt-14b", "long-14b")


@dataclass(frozen=True)
class Narrowing:
    """A member of a group that a drop forms: so many layers before, so many afterwards."""

    before: int
    after: int


@dataclass(frozen=True)
class Looked:
    """At one drop."""

    needed_bytes: int
    freed_bytes: int
    exchange_bytes: int
    saved_today: float  # share of the exchange
    saved_at_best: float
    exceeded_after_s: float | None  # demand exceeds what a partial drop leaves; None: never before the restore


def saved_at_best(needed_bytes: int, freed_bytes: int) -> float:
    """Every layer kept in duplicate saves as much of the exchange as it is a share of what is dropped."""
    return max(0.0, 1.0 - needed_bytes / freed_bytes)


def saved_today(
    groups: Sequence[Sequence[Narrowing]], alone_blocks: int, shape: ModelShape, needed_bytes: int
) -> float:
    """Members all keep as many layers more as the requirement allows, group by group.

    `alone_blocks`: KV blocks of an instance that holds all layers.
    """
    layers = shape.layer_count
    budget_bytes = shape.copy_bytes + shape.other_parameter_bytes + alone_blocks * shape.block_bytes * layers
    needed_blocks = -(-needed_bytes // (shape.block_bytes * layers))

    def blocks(group: Sequence[Narrowing], more: int) -> int:
        return min(shape.block_count(budget_bytes, 0, min(m.before, m.after + more)) for m in group)

    usable = sum(
        blocks(group, 0) - sum(shape.block_count(budget_bytes, 0, m.before) for m in group) for group in groups
    )
    spare = usable - needed_blocks
    kept = dropped = 0
    for group in groups:
        more = 0
        while more < layers and blocks(group, 0) - blocks(group, more + 1) <= spare:
            more += 1
        spare -= blocks(group, 0) - blocks(group, more)
        kept += sum(min(m.before, m.after + more) - m.after for m in group)
        dropped += sum(m.before - m.after for m in group)
    return kept / dropped if dropped and usable >= needed_blocks else 0.0


def look(run: SimRun) -> Iterator[Looked]:
    drops = [
        r
        for r in run.transitions
        if r.journal.kind is TransitionKind.DROP and r.by == "overload" and r.shape is not None
    ]
    restores_s = [r.began_at_s - run.zero_s for r in run.transitions if r.journal.kind is TransitionKind.RESTORE]
    for record in drops:
        began_s = record.began_at_s - run.zero_s
        asked = [s.required_bytes for at_s, s in run.signals if isinstance(s, Overload) and at_s <= began_s + 1e-3]
        before = [sample for sample in run.samples if sample.at_s <= began_s]
        if asked and before:
            ends_s = min((at_s for at_s in restores_s if at_s > began_s), default=run.duration_s)
            limit_bytes = before[-1].kv_capacity_bytes + asked[-1]
            over = (s.at_s for s in run.samples if began_s < s.at_s < ends_s and s.kv_demand_bytes > limit_bytes)
            exceeded_s = next(over, None)
            yield _looked(record, asked[-1], None if exceeded_s is None else exceeded_s - began_s)


def _looked(record: TransitionRecord, needed_bytes: int, exceeded_after_s: float | None) -> Looked:
    shape = record.shape
    assert shape is not None
    widths = {m.worker_id: m.last_layer - m.first_layer for g in record.journal.base.groups for m in g.members}
    groups = [
        [Narrowing(widths[m.worker_id], m.last_layer - m.first_layer) for m in group.members]
        for group in record.changed_groups
    ]
    freed_bytes = sum(m.before - m.after for group in groups for m in group) * shape.copy_bytes // shape.layer_count
    # An instance that held all layers has as many blocks as it has bytes for; all have the same memory here.
    alone = [s.block_count_before for w, s in record.statuses.items() if widths.get(w) == shape.layer_count]
    today = saved_today(groups, min(alone), shape, needed_bytes) if alone else 0.0
    best = saved_at_best(needed_bytes, freed_bytes)
    return Looked(needed_bytes, freed_bytes, record.total("kv_bytes_sent"), today, best, exceeded_after_s)


def simulated(name: str, rate_scale: float) -> SimRun:
    scenario = read_scenario(SCENARIOS / f"{name}.yaml")
    job = job_of(scenario.model_copy(update={"policies": ("drop",), "rate_scale": rate_scale}))
    options = WorldOptions(
        model=job.model, cluster=job.cluster, timings=job.timings, rules=specs_of(job)[0][1], seed=job.seed
    )
    return World(options, arrivals_of(job.trace)).run()


def line(name: str, rate_scale: float, found: Sequence[Looked]) -> str:
    if not found:
        return f"| {name} x {rate_scale:g} | 0 | | | | | | |"
    exchanged = sum(one.exchange_bytes for one in found)
    today = sum(one.exchange_bytes * one.saved_today for one in found)
    best = sum(one.exchange_bytes * one.saved_at_best for one in found)
    again = [one for one in found if one.exceeded_after_s is not None]
    lasting = sum(one.exchange_bytes * one.saved_at_best for one in found if one.exceeded_after_s is None)
    after = f"{statistics.median(one.exceeded_after_s or 0.0 for one in again):.1f} s" if again else ""
    asked = statistics.median(one.needed_bytes / one.freed_bytes for one in found)
    return (
        f"| {name} x {rate_scale:g} | {len(found)} | {asked:.0%} | {exchanged / 1e9:.1f} GB |"
        f" {today / max(1, exchanged):.1%} | {best / max(1, exchanged):.1%} | {len(again)} of {len(found)}, {after} |"
        f" {lasting / max(1, exchanged):.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", default=NAMES, metavar="NAME", help="under benchmarks/scenarios")
    parser.add_argument("--rate-scale", type=float, nargs="+", default=[1.0], metavar="X")
    given = parser.parse_args()
    print(
        "| run | drops | asked for, of what they freed | exchange | saved as KV is laid out today | saved at best |"
        " second drop | saved at best without those |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in given.scenarios:
        for rate_scale in given.rate_scale:
            print(line(name, rate_scale, list(look(simulated(name, rate_scale)))), flush=True)


if __name__ == "__main__":
    main()
