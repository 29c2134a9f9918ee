"""Targets are given for all classes, for some, or in a file."""

import json
import math
from pathlib import Path

import pytest

from ballast.common.sampling import PriorityClass
from ballast.common.targets import Targets, read_by_class

INTERACTIVE, DEFAULT = PriorityClass.INTERACTIVE, PriorityClass.DEFAULT


def test_one_number_is_for_all_online_classes() -> None:
    assert read_by_class("0.05") == {INTERACTIVE: 0.05, DEFAULT: 0.05}


def test_classes_have_their_own(tmp_path: Path) -> None:
    file = tmp_path / "targets.json"
    file.write_text(json.dumps({"interactive": 0.03, "default": 1}))
    assert read_by_class(str(file)) == read_by_class("interactive=0.03, default=1") == {INTERACTIVE: 0.03, DEFAULT: 1.0}
    assert read_by_class("default=2") == {DEFAULT: 2.0}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0", "no positive number"),
        ("nan", "no positive number"),
        ("soon", "no positive number"),
        ("batch=1", "'batch' is no online class"),
        ("interactive", "no positive number"),
        ("nowhere.json", "cannot be read"),
    ],
)
def test_invalid_targets_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_by_class(text)


def test_a_requests_own_target_takes_precedence_over_its_classs() -> None:
    assert Targets(tpot_s=0.1).or_else(Targets(0.5, 0.2)) == Targets(0.5, 0.1)
    assert Targets().or_else(Targets()) == Targets(math.inf, math.inf)
