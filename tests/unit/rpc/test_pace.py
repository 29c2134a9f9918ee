"""Plans depend on the step costs that workers report, so only plausible numbers are accepted."""

import pytest

from ballast.common.cost import CostModel
from ballast.common.errors import InvalidRequest
from ballast.common.traffic import Pace, Traffic
from ballast.rpc import codec

COST = CostModel(attention_s=1e-9, token_s=1e-5, chunk_s=2e-3, shared_s=1e-3, prefix_s=1e-8, many_s=0.0, beyond_s=1e-6)


def test_a_cost_model_survives_a_round_trip() -> None:
    pace = Pace(COST, 24, 2048)
    assert codec.PACE.record(codec.PACE.message(pace)) == pace


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1e-3])
@pytest.mark.parametrize("field", ["attention_s", "token_s", "chunk_s", "shared_s", "prefix_s", "many_s", "beyond_s"])
def test_implausible_step_costs_are_refused(field: str, seconds: float) -> None:
    message = codec.PACE.message(Pace(COST, 24, 2048))
    setattr(message.cost, field, seconds)
    with pytest.raises(InvalidRequest, match="pace"):
        codec.PACE.record(message)


def test_savings_may_not_exceed_the_cost_of_a_sequence() -> None:
    message = codec.PACE.message(Pace(COST, 24, 2048))
    message.cost.shared_s = 5e-3
    with pytest.raises(InvalidRequest, match="shared_s"):
        codec.PACE.record(message)


@pytest.mark.parametrize("field", ["queued_count", "minute_tokens", "ended_tokens", "open_tokens"])
def test_counts_of_traffic_are_not_negative(field: str) -> None:
    message = codec.TRAFFIC.message(Traffic(known_s=3.0))
    assert codec.TRAFFIC.record(message) == Traffic(known_s=3.0)
    setattr(message, field, -1)
    with pytest.raises(InvalidRequest, match="traffic"):
        codec.TRAFFIC.record(message)
