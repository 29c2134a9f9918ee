"""The table of longest contexts, which agrees with the planner's results."""

import pytest

from sim.contexts import COUNTS, context_of, table
from sim.hardware import find_gpu, find_model
from tools.cli.main import main


def test_a_pair_of_small_cards_holds_the_models_maximum_length() -> None:
    found = context_of(find_model("Llama-3.1-8B"), find_gpu("L4", "--gpu"), 1)
    alone, pair = found.tokens[1], found.tokens[2]
    assert alone is not None
    assert pair is not None
    assert alone < found.max_model_len < pair
    assert list(found.tokens) == list(COUNTS)


def test_a_model_that_does_not_fit_has_no_context() -> None:
    found = context_of(find_model("Llama-3.1-70B"), find_gpu("L4", "--gpu"), 1)
    assert set(found.tokens.values()) == {None}
    assert table([found])[-1].startswith("| Llama-3.1-70B, 1 x L4 | - | - |")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "context"]) == 0
    assert "| Llama-3.1-8B, 1 x L4 | 5" in capsys.readouterr().out
    assert main(["model", "context", "--model", "Llama-3.1-8B"]) == 2
    assert "belong together" in capsys.readouterr().err
