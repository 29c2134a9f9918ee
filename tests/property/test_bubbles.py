"""Lookahead batching on the real core in virtual time: smaller pipeline bubbles and earlier first tokens."""

import random

import pytest

from ballast.common.cost import CostModel
from services.worker.policy.lookahead import lookahead
from services.worker.policy.microbatching import by_token_count
from tests.support.virtual_pipeline import COST, PLENTY, Outcome, Pipeline


def requests(seed: int, count: int, longest: int, answer: int) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of each request. Half of the prompts are short; the others have up to `longest`
    tokens.
    """
    rng = random.Random(seed)
    ranges = [(20, longest // 10), (longest // 2, longest)]
    return [(rng.randint(*rng.choice(ranges)), rng.randint(2, answer)) for _ in range(count)]


def played(stages: int, blocks: int, wanted: list[tuple[int, int]], model: CostModel | None) -> Outcome:
    policy = by_token_count if model is None else lookahead(lambda: model)
    return Pipeline(policy, COST, wanted, stages, blocks).run()


@pytest.mark.parametrize(
    ("stages", "blocks", "longest", "answer"), [(2, PLENTY, 4000, 40), (4, PLENTY, 6000, 30), (4, 2400, 1500, 150)]
)
def test_under_backlog_stages_wait_a_third_as_long_and_more_gets_done(
    stages: int, blocks: int, longest: int, answer: int
) -> None:
    wanted = requests(stages, 60 * stages, longest, answer)
    counted = played(stages, blocks, wanted, None)
    ahead = played(stages, blocks, wanted, COST.scaled(1 / stages))
    assert ahead.backlog_bubble < counted.backlog_bubble / 3
    assert ahead.wall_s < counted.wall_s * 0.97
    assert ahead.first_token_s < counted.first_token_s


def test_a_cost_model_with_an_error_of_a_third_still_helps() -> None:
    wanted = requests(5, 160, 6000, 30)
    off = CostModel(COST.attention_s * 1.3, COST.token_s * 0.8, COST.chunk_s * 2, COST.shared_s * 2, 0.0)
    counted, ahead = played(4, PLENTY, wanted, None), played(4, PLENTY, wanted, off)
    assert ahead.backlog_bubble < counted.backlog_bubble
    assert ahead.wall_s < counted.wall_s


def test_batches_with_a_high_fixed_cost_mix_prompts_with_decodes() -> None:
    """Uses a cost model like a GPU's: a batch of a few decodes takes a fifth of a full batch's time, since all
    parameters are read.
    """
    gpu = CostModel(attention_s=9.5e-9, token_s=1.4e-4, chunk_s=1.84e-2, shared_s=1.84e-2, prefix_s=1.4e-7)
    for stages in (2, 4):
        wanted = requests(stages, 60 * stages, 1200, 200)
        counted = Pipeline(by_token_count, gpu, wanted, stages, PLENTY).run()
        own = gpu.scaled(1 / stages)
        ahead = Pipeline(lookahead(lambda own=own: own), gpu, wanted, stages, PLENTY).run()
        assert ahead.backlog_bubble < counted.backlog_bubble / 2
        assert ahead.wall_s < counted.wall_s * 0.97


def test_lookahead_gives_a_lone_prompt_an_earlier_first_token() -> None:
    counted, ahead = (played(4, PLENTY, [(8000, 2)], model) for model in (None, COST.scaled(1 / 4)))
    assert ahead.first_token_s < counted.first_token_s / 2
