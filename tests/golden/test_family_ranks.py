"""Decoder families split over two ranks according to `transformers`' own plans give the tokens of one rank."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ballast.common.errors import ConfigError
from services.worker.engine.load import load_engine
from services.worker.engine.peers import Apart
from tests.support.engine import Job, generate
from tests.support.families import DIVIDED, greedy_alone, write_family
from tests.support.peers import OneOf, Together
from tests.support.quantised import dense_of
from tests.support.reference import NEAR_TIE

pytestmark = [pytest.mark.golden]

LENGTHS = (5, 23, 40)
TOKENS = 8
MEMORY_BYTES = 8 << 20
# Half of 48 rows or columns ends within a quantisation group of 16 or 40.
MADE_DENSE = {"deepseek_v3:fp8", "llama:fp8 ragged", "qwen3_moe:awq", "qwen3_moe:fp8"}


@pytest.mark.rotating(5)
@pytest.mark.parametrize("name", DIVIDED)
def test_two_ranks_generate_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    folder = write_family(name, tmp_path)
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(3, 380) for _ in range(length)) for length in LENGTHS]
    together = Together(2)

    def one(rank: int) -> tuple[list[list[int]], int]:
        peers = OneOf(together, rank)
        jobs = [Job(i, prompt, TOKENS) for i, prompt in enumerate(prompts)]
        with load_engine(
            folder, dtype="float32", device_memory_bytes=MEMORY_BYTES, model_impl="transformers", peers=peers
        ) as engine:
            assert engine.info.tensor_parallel_size == 2
            generate(engine, jobs, chunk_tokens=11)
            parameter_bytes = sum(engine.memory.parameters.size_bytes_of(i) for i in range(engine.config.layer_count))
            engine.memory.drop_layers([1])
            engine.memory.release_retired()
            engine.memory.make_room_for_layers([1], block_count=1)
            engine.read_layer(1)
            parameters = engine.memory.parameters
            assert parameters.layer_checksum(1) == parameters.loaded_checksums[1]
        return [job.chosen for job in jobs], parameter_bytes

    with ThreadPoolExecutor(2) as threads:
        (first, share_bytes), (second, _) = threads.map(one, range(2))
    assert first == second
    near_ties = 0
    for tokens, wanted in zip(first, greedy_alone(dense_of(folder), prompts, TOKENS), strict=True):
        for token, right, gap in zip(tokens, wanted.token_ids, wanted.gaps, strict=True):
            if token != right:
                assert gap < NEAR_TIE
                near_ties += 1
                break  # after a differing token the contexts differ
    assert near_ties <= 1
    with load_engine(folder, dtype="float32", device_memory_bytes=MEMORY_BYTES, model_impl="transformers") as whole:
        whole_bytes = sum(whole.info.layer_parameter_bytes)
        assert (share_bytes < 0.95 * whole_bytes) == (name not in MADE_DENSE)


@pytest.mark.parametrize(
    ("name", "count", "why"),
    [
        ("gpt2", 2, "has no plan for GPT2LMHeadModel"),
        ("gpt_oss", 2, "has no plan for GptOssForCausalLM"),
        ("llama", 4, "4 does not divide"),
        ("llama", 3, "3 does not divide"),
    ],
)
def test_a_family_that_cannot_be_divided_is_refused(name: str, count: int, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        load_engine(
            write_family(name, tmp_path),
            device_memory_bytes=MEMORY_BYTES,
            model_impl="transformers",
            peers=Apart(0, count),
        )
