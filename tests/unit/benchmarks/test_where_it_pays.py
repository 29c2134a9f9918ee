"""The map: bursts that are about as far over in each cell, and a figure of what is there."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.where_it_pays import ANSWERS, OURS, SHARES, STATICS, burst_of, spots, trace_of
from benchmarks.where_it_pays_figure import draw


def test_a_burst_is_over_memory_or_prompts_take_most_of_the_time() -> None:
    long, short = burst_of(0.8, 1000), burst_of(0.2, 100)
    assert long.demand == pytest.approx(1.25, abs=0.01)
    assert long.prompt_share < 0.5
    assert short.prompt_share == pytest.approx(0.85, abs=0.01)
    assert short.demand < 1.0
    trace = trace_of(long, 1000, 7)
    assert trace == trace_of(long, 1000, 7)
    inside = [r for r in trace.requests if long.before_s <= r.arrival_s < long.before_s + long.for_s]
    assert len(inside) == pytest.approx(4 * long.rate_per_s * long.for_s, rel=0.2)


def test_a_cell_is_drawn_once_all_policies_have_been_run(tmp_path: Path) -> None:
    waits = {"recompute": 30.0, "static-pipeline": 4.0, OURS: 0.5}
    runs: dict[tuple[float, int, str], dict[str, Any]] = {
        (share, 1000, policy): {"failed": None, "ttft_p99_s": wait, "tpot_p50_s": 0.05, "prompts": 0.3}
        for share in (0.8, 0.6)
        for policy, wait in waits.items()
    }
    del runs[0.6, 1000, STATICS[1]]
    [spot] = spots(runs)
    assert (spot.share, spot.answer, spot.pace) == (0.8, 1000, 1.0)
    assert spot.over(spot.plain_s) == 30.0
    assert spot.over(spot.static_s) == 4.0
    draw([spot], SHARES, ANSWERS, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 10_000
