"""Greedy tokens equal those of `transformers` for every chunk size, batch and block layout."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.worker.engine.load import load_engine
from tests.golden.conftest import MAX_LEN, CheckpointMaker
from tests.support.engine import Job, generate
from tests.support.reference import NEAR_TIE, Reference, reference_greedy_batch

pytestmark = [pytest.mark.golden]

ARCHITECTURES = ("llama", "llama3", "mistral", "qwen2", "qwen3")
PROMPTS = 200
OUTPUT_TOKENS = 10
MEMORY_BYTES = 96 << 20
MAX_NEAR_TIE_FRACTION = 1e-3  # a larger fraction would indicate a real error


def prompts_of_all_lengths(count: int, seed: int) -> list[tuple[int, ...]]:
    """Random prompts, from one token to one less than the model's maximum, skewed towards short ones."""
    rng = random.Random(seed)
    lengths = [1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, MAX_LEN - 17, MAX_LEN - 16, MAX_LEN - 2, MAX_LEN - 1]
    lengths += [min(MAX_LEN - 1, int(rng.expovariate(1 / 60)) + 1) for _ in range(count - len(lengths))]
    return [tuple(rng.randrange(3, 512) for _ in range(length)) for length in lengths]


def expected(model_dir: Path, prompts: Sequence[tuple[int, ...]], dtype: str) -> list[Reference]:
    counts = [min(OUTPUT_TOKENS, MAX_LEN - len(prompt)) for prompt in prompts]
    return reference_greedy_batch(model_dir, prompts, counts, dtype)


def near_ties(jobs: Sequence[Job], references: Sequence[Reference]) -> int:
    """The number of tokens that differ where the reference's top two logits nearly tie; any other difference fails."""
    count = 0
    for job, reference in zip(jobs, references, strict=True):
        for at, (token, wanted) in enumerate(zip(job.chosen, reference.token_ids, strict=True)):
            if token != wanted:
                assert reference.gaps[at] < NEAR_TIE, (
                    f"prompt of {len(job.prompt)} tokens, output {at}: {token} instead of {wanted},"
                    f" which was better by {reference.gaps[at]}"
                )
                count += 1
    return count


def run(
    model_dir: Path, dtype: str, prompts: Sequence[tuple[int, ...]], chunk_sizes: Sequence[int], kernels: str = "auto"
) -> None:
    references = expected(model_dir, prompts, dtype)
    tokens = sum(len(reference.token_ids) for reference in references)
    with load_engine(model_dir, dtype=dtype, device_memory_bytes=MEMORY_BYTES, kernels=kernels) as engine:
        for chunk_tokens in chunk_sizes:
            jobs = [
                Job(i, prompt, len(reference.token_ids), forced=reference.token_ids)
                for i, (prompt, reference) in enumerate(zip(prompts, references, strict=True))
            ]
            generate(engine, jobs, chunk_tokens=chunk_tokens, seed=chunk_tokens)
            differing = near_ties(jobs, references)
            assert differing <= (MAX_NEAR_TIE_FRACTION * tokens if dtype == "float32" else 0)
            assert engine.runner.sequence_ids == ()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_tokens_equal_transformers(checkpoint: CheckpointMaker, arch: str, dtype: str) -> None:
    run(checkpoint(arch, False), dtype, prompts_of_all_lengths(PROMPTS, seed=11), (7, 64, 512))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("arch", ["llama3", "qwen3"])
def test_greedy_tokens_of_torch_kernels(checkpoint: CheckpointMaker, arch: str, dtype: str) -> None:
    run(checkpoint(arch, False), dtype, prompts_of_all_lengths(60, seed=11), (64,), "torch")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_with_tied_embeddings(checkpoint: CheckpointMaker, arch: str) -> None:
    run(checkpoint(arch, True), "float64", prompts_of_all_lengths(60, seed=12), (64,))
