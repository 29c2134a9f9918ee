"""Logits are close to those of `transformers`, and identical for every way to split the work."""

import random

import pytest
import torch

from ballast.common.sampling import SamplingParams
from services.worker.core.batch import Slice
from services.worker.engine.load import Engine, load_engine
from tests.golden.conftest import CheckpointMaker
from tests.support.engine import GREEDY, KERNELS, BlockPool, Job, forward, generate
from tests.support.reference import reference_logits

pytestmark = [pytest.mark.golden]

MEMORY_BYTES = 96 << 20


def tokens(count: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 512) for _ in range(count))


def in_chunks(engine: Engine, token_ids: tuple[int, ...], sizes: list[int], table: tuple[int, ...]) -> torch.Tensor:
    parts: list[torch.Tensor] = []
    done = 0
    for size in sizes:
        parts += forward(engine, [Slice(0, done, token_ids[done : done + size], True)], [table])
        done += size
    assert done == len(token_ids)
    return torch.cat(parts)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-4), ("float64", 1e-6)])
@pytest.mark.parametrize("arch", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
def test_logits_are_close_to_those_of_transformers(
    checkpoint: CheckpointMaker, arch: str, dtype: str, atol: float, kernels: str
) -> None:
    token_ids = tokens(300, seed=1)
    with load_engine(checkpoint(arch, False), dtype=dtype, device_memory_bytes=MEMORY_BYTES, kernels=kernels) as engine:
        table = BlockPool(engine.block_count, engine.block_tokens).take(len(token_ids))
        ours = in_chunks(engine, token_ids, [100, 1, 1, 198], table)
    theirs = reference_logits(checkpoint(arch, False), token_ids, dtype)
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize("chunk_tokens", [7, 64, 512])
def test_logprobs_of_a_prompt_are_those_of_transformers(checkpoint: CheckpointMaker, chunk_tokens: int) -> None:
    model_dir = checkpoint("qwen2", False)
    rng = random.Random(7)
    scored = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=3)
    jobs = [Job(i, tokens(rng.randrange(1, 150), seed=i), 3, scored if i % 2 else GREEDY) for i in range(9)]
    with load_engine(model_dir, dtype="float64", device_memory_bytes=MEMORY_BYTES) as engine:
        generate(engine, jobs, at_once=4, chunk_tokens=chunk_tokens)
    for job in jobs:
        if job.sampling is GREEDY:
            assert job.logprobs == [None] * 3
            continue
        first, *others = [logprobs for logprobs in job.logprobs if logprobs is not None]
        assert [each.prompt for each in others] == [(), ()]
        assert tuple(each.token_id for each in first.prompt) == job.prompt
        assert (first.prompt[0].logprob, first.prompt[0].top) == (0.0, ())
        theirs = reference_logits(model_dir, job.prompt, "float64").log_softmax(-1)
        for position, ours in enumerate(first.prompt[1:]):
            assert ours.logprob == pytest.approx(float(theirs[position, ours.token_id]), abs=1e-6)
            best = theirs[position].topk(3)
            assert [token_id for token_id, _ in ours.top] == best.indices.tolist()
            assert [value for _, value in ours.top] == pytest.approx(best.values.tolist(), abs=1e-6)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_as_exact_as_the_reference_in_bfloat16(
    checkpoint: CheckpointMaker, arch: str, kernels: str
) -> None:
    token_ids = tokens(200, seed=3)
    model_dir = checkpoint(arch, False)
    with load_engine(model_dir, dtype="bfloat16", device_memory_bytes=MEMORY_BYTES, kernels=kernels) as engine:
        table = BlockPool(engine.block_count, engine.block_tokens).take(len(token_ids))
        ours = in_chunks(engine, token_ids, [64, 64, 72], table)
    exact = reference_logits(model_dir, token_ids, "float64")
    theirs = reference_logits(model_dir, token_ids, "bfloat16")
    assert (ours - exact).square().mean() < 1.2 * (theirs - exact).square().mean()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("sizes", [[7] * 20 + [10], [64, 64, 22], [149, 1], [1] * 150])
def test_chunked_prefill_equals_whole_prefill(checkpoint: CheckpointMaker, sizes: list[int], kernels: str) -> None:
    token_ids = tokens(150, seed=2)
    with load_engine(
        checkpoint("qwen3", False), dtype="float64", device_memory_bytes=MEMORY_BYTES, kernels=kernels
    ) as engine:
        pool = BlockPool(engine.block_count, engine.block_tokens)
        whole = in_chunks(engine, token_ids, [150], pool.take(150))
        cut = in_chunks(engine, token_ids, sizes, pool.take(150))
    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_batch_equals_its_sequences_alone(checkpoint: CheckpointMaker, kernels: str) -> None:
    lengths = [1, 5, 16, 33, 90, 200, 2, 47]
    prompts = [tokens(length, seed=length) for length in lengths]
    with load_engine(
        checkpoint("llama3", False), dtype="float64", device_memory_bytes=MEMORY_BYTES, kernels=kernels
    ) as engine:
        pool = BlockPool(engine.block_count, engine.block_tokens)
        tables = [pool.take(length + 1) for length in lengths]
        together = forward(engine, [Slice(i, 0, p, True) for i, p in enumerate(prompts)], tables)
        decoded = forward(engine, [Slice(i, len(p), (9,), True) for i, p in enumerate(prompts)], tables)
        for i, prompt in enumerate(prompts):
            table = pool.take(len(prompt) + 1)
            (alone,) = forward(engine, [Slice(i, 0, prompt, True)], [table])
            (next_alone,) = forward(engine, [Slice(i, len(prompt), (9,), True)], [table])
            torch.testing.assert_close(together[i], alone, atol=1e-6, rtol=0)
            torch.testing.assert_close(decoded[i], next_alone, atol=1e-6, rtol=0)
