"""Latency targets given in a call's headers."""

import math
from typing import Any, cast

import pytest

from ballast.common.errors import InvalidRequest
from ballast.common.targets import Targets
from services.dispatcher.servicer import targets_of


class Called:
    def __init__(self, **headers: str) -> None:
        self._headers = headers

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(name.replace("_", "-"), value) for name, value in self._headers.items()]


def told(**headers: str) -> Targets:
    return targets_of(cast(Any, Called(**headers)))


def test_a_call_may_have_either_both_or_none() -> None:
    assert told(authorization="x") == Targets()
    assert told(x_ballast_tpot_target_s="0.1") == Targets(math.inf, 0.1)
    assert told(x_ballast_tpot_target_s="0.1", x_ballast_ttft_target_s="2") == Targets(2.0, 0.1)


def test_an_invalid_target_header_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="x-ballast-tpot-target-s"):
        told(x_ballast_tpot_target_s="soon")
