"""Prefix caching changes no token and no log probability. The layers are real and memory is scarce."""

import random

import pytest

from ballast.common.sampling import SamplingParams
from ballast.service.tokenizer import load_tokenizer
from services.worker.engine.load import load_engine
from tests.golden.conftest import CheckpointMaker
from tests.support.engine_loop import Answer, EngineLoop

pytestmark = [pytest.mark.golden]

REQUESTS = 80
BLOCKS = 40
_VOCAB = 500


def _play(loop: EngineLoop) -> list[Answer]:
    """Requests whose prompts share prefixes: some prompts end within the prefix, and follow-ups include earlier
    answers.
    """
    rng = random.Random(5)
    trunks = [tuple(rng.randrange(5, _VOCAB) for _ in range(rng.randrange(40, 200))) for _ in range(4)]
    answers: list[Answer] = []

    def submit_some() -> bool:
        if len(answers) < REQUESTS and rng.random() < 0.3:
            trunk = trunks[rng.randrange(4)]
            shared = trunk[: rng.choice((len(trunk), len(trunk), 64, 33))]
            own = tuple(rng.randrange(5, _VOCAB) for _ in range(rng.choice((0, 1, 5, 40))))
            sampling = SamplingParams(
                temperature=rng.choice((0.0, 0.0, 0.8)),
                seed=len(answers),
                max_tokens=rng.randrange(2, 40),
                logprobs=rng.choice((None, None, 2)),
                frequency_penalty=rng.choice((0.0, 0.0, 0.7)),
                ignore_eos=True,
            )
            answers.append(loop.submit((*shared, *own), sampling))
        return len(answers) < REQUESTS

    loop.run(submit_some)
    loop.finish()
    return answers


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_tokens_equal_those_without_caching(checkpoint: CheckpointMaker, arch: str) -> None:
    model_dir = checkpoint(arch, False)
    tokenizer = load_tokenizer(model_dir)
    played: dict[bool, list[Answer]] = {}
    with load_engine(model_dir, dtype="float64", device_memory_bytes=64 << 20) as engine:
        for caching in (False, True):
            loop = EngineLoop(
                engine, tokenizer, block_count=BLOCKS, max_running_count=16, max_batch_tokens=64, prefix_caching=caching
            )
            played[caching] = _play(loop)
            index = loop.core.group_scheduler.scheduler.prefixes
            assert (index.hit_tokens_total > 0.3 * index.queried_tokens_total) == caching
            assert loop.core.totals.preemptions >= 3
    for without, with_caching in zip(played[False], played[True], strict=True):
        assert with_caching.token_ids == without.token_ids
        assert with_caching.text == without.text
        assert [p.logprob for p in with_caching.logprobs] == pytest.approx([p.logprob for p in without.logprobs])
