"""Merges new rows into a page's table."""

from benchmarks.prefix_routing import merged

HEAD = ["| cell | | n |", "|---|---|---|"]


def test_new_rows_replace_those_of_their_cell_only() -> None:
    first = merged("", "- one", [*HEAD, "| b | off | 1 |", "|  | on | 2 |"])
    assert first == "\n".join(["- one", "", *HEAD, "| b | off | 1 |", "|  | on | 2 |"])
    second = merged(first, "- two", [*HEAD, "| a | off | 3 |", "|  | on | 4 |", "| b | off | 5 |"])
    assert second == "\n".join(["- one", "- two", "", *HEAD, "| a | off | 3 |", "|  | on | 4 |", "| b | off | 5 |"])
    assert merged(second, "- two", HEAD) == second
