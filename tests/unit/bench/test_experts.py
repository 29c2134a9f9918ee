"""On GPUs with fast memory, MoE models spend more time on decodes than on prompts; a drop must help these models,
too.
"""

import pytest

from benchmarks.experts import POLICIES, ExpertsCell


@pytest.mark.rotating
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["Mixtral-8x7B", "gpt-oss-20b"])
def test_a_drop_at_least_halves_waits_for_mixtures_of_experts(model: str) -> None:
    cell = ExpertsCell.of(model, "H100-80G")
    plain_s, ours_s = (float(cell.run(policy, 7)["ttft_p99_s"]) for policy in POLICIES)
    assert ours_s <= 0.5 * plain_s
