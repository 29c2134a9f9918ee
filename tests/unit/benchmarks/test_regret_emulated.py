"""Cells in real time: which part of them is played, and what stands in the table."""

import pytest

from ballast.common.errors import ConfigError
from benchmarks.regret_emulated import EFFORT, Figures, Row, order, parse_parts, same_order, summary, table
from tools.bench.traces import Trace, TraceRequest

CELL = "chat-13b-40g-x1.4"


def test_a_part_of_a_cell_begins_at_its_own_zero() -> None:
    whole, part = parse_parts(f"{CELL},{CELL}@100-220")
    assert (whole.from_s, whole.until_s) == (0.0, 300.0)
    requests = tuple(TraceRequest(at_s, 10, 10) for at_s in (99.0, 100.0, 219.0, 220.0))
    cut = part.cut(Trace(source="", format="", requests=requests))
    assert [r.arrival_s for r in cut.requests] == [0.0, 119.0]


@pytest.mark.parametrize("word", ["chat", f"{CELL}@", f"{CELL}@100", f"{CELL}@200-100", f"{CELL}@0-301", f"{CELL}@a-b"])
def test_wrong_parts_are_named(word: str) -> None:
    with pytest.raises(ConfigError, match="--cells"):
        parse_parts(word)


def row(policy: str, emulated_s: float, simulated_s: float) -> Row:
    ours, theirs = (Figures(0.2, p99_s, 0.04, 1000.0, 1.0) for p99_s in (emulated_s, simulated_s))
    return Row(CELL, policy, ours, theirs, 1, dict.fromkeys(EFFORT, 0.01))


def test_policies_that_are_as_good_have_no_order() -> None:
    rows = [row("recompute", 9.0, 10.0), row("static-pipeline", 0.9, 0.7), row("drop", 0.6, 0.9)]
    assert order(rows, lambda r: r.emulated) == "drop = static-pipeline < recompute"
    assert same_order(rows)
    assert not same_order([row("recompute", 2.0, 4.0), row("drop", 3.0, 0.9)])


def test_the_table_has_both_and_the_summary_counts_what_is_near() -> None:
    rows = [row("recompute", 15.0, 10.0), row("drop", 1.0, 1.0)]
    assert "| recompute (1) | 0.20 (0.20, +0%) | 15.00 (10.00, +50%) | 40 (40, +0%) |" in table(rows)
    told = summary(rows)
    assert "TTFT P99: 1 of 2 within 40%, half within 25%" in told
    assert "The same order of the policies by P99 TTFT in 1 of 1 cells" in told
