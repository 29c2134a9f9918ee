"""Placement of requests on instances that start and stop."""

import random

import pytest

from benchmarks.packing import against_the_paper, arrivals, cells, lengths, table
from sim.fleet import PLACEMENTS, FleetOutcome, SimFleet, jobs_of
from sim.hardware import find_cluster, find_model, timings


def outcome(placement: str, seconds: float = 150.0) -> FleetOutcome:
    rng = random.Random(1)
    fleet = SimFleet(find_model("Llama-2-7B"), find_cluster("8xRTX-4090"), timings(), PLACEMENTS[placement])
    return fleet.run(jobs_of(arrivals(1.1, seconds, 1), lambda: lengths(rng), fleet.capacity))


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_every_placement_serves_all_requests_on_well_filled_instances(placement: str) -> None:
    found = outcome(placement, 60.0)
    assert 1 < found.mean_nodes <= found.most_nodes
    assert 0.2 < found.used <= 1.0
    assert found.ttft_p99_s < 5.0


def test_lean_needs_no_more_instances_than_others_and_recomputes_little() -> None:
    lean, best, worst, balance = (outcome(name) for name in ("lean", "best-fit", "worst-fit", "balance"))
    assert lean.mean_nodes <= 1.03 * min(best.mean_nodes, worst.mean_nodes, balance.mean_nodes)
    assert lean.recomputed_count < worst.recomputed_count < best.recomputed_count
    assert balance.moves_per_s < lean.moves_per_s
    assert worst.moves_per_s == 0.0


def test_the_table_has_a_line_for_each_cell_and_one_for_each_figure() -> None:
    found = cells(("best-fit", "worst-fit", "balance", "lean", "mell", "mell-repaired"), (1.1,), 40.0)
    assert len(table(found).splitlines()) == 2 + 12
    words = against_the_paper(found)
    assert [line.split("|")[1].strip() for line in words.splitlines()[2:]] == [
        "figure 11",
        "figure 11",
        "figure 11",
        "figure 12",
        "figure 13",
        "figure 14",
    ]
