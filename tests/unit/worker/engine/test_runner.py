"""Guarantees of a step other than its greedy tokens, which tests/golden compares with the reference."""

import random
from pathlib import Path

import pytest
import torch

from ballast.common.errors import InvariantViolation
from ballast.common.sampling import SamplingParams
from services.worker.core.batch import IN_FLIGHT, Batch, LaunchedStep, NewSequence, Slice
from services.worker.engine.load import Engine, load_engine
from tests.support.engine import GREEDY, KERNELS, Job, generate


def engine_of(model_dir: Path) -> Engine:
    return load_engine(model_dir, dtype="float64", device_memory_bytes=16 << 20)


def sampled_jobs(count: int) -> list[Job]:
    rng = random.Random(5)
    jobs: list[Job] = []
    for i in range(count):
        prompt = tuple(rng.randrange(3, 320) for _ in range(rng.randrange(1, 60)))
        sampling = SamplingParams(
            seed=rng.randrange(2**40),
            temperature=rng.choice([0.6, 1.0, 1.5]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            min_p=rng.choice([0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.4]),
            frequency_penalty=rng.choice([0.0, 0.3]),
            ignore_eos=True,
        )
        jobs.append(Job(i, prompt, 12, sampling))
    return jobs


def test_sampled_tokens_are_the_same_alone_in_a_batch_and_after_a_preemption(model_dir: Path) -> None:
    with engine_of(model_dir) as engine:
        together, alone, resumed = (sampled_jobs(32) for _ in range(3))
        generate(engine, together, at_once=32, chunk_tokens=9)
        generate(engine, alone, at_once=1)
        for job, before in zip(resumed, alone, strict=True):
            cut = 1 + job.sequence_id % 11
            job.output, job.count = tuple(before.chosen[:cut]), job.count - cut
        generate(engine, resumed, at_once=5, chunk_tokens=16)
        assert [job.chosen for job in together] == [job.chosen for job in alone]
        assert [list(job.output) + job.chosen for job in resumed] == [job.chosen for job in alone]
        assert len({tuple(job.chosen) for job in alone}) == 32


def test_a_preemption_removes_and_adds_in_one_batch(model_dir: Path) -> None:
    with engine_of(model_dir) as engine:
        (undisturbed,) = jobs = [Job(1, (5, 6, 7), 6)]
        generate(engine, jobs)
        table = [(0, 1)]
        first = engine.step(
            Batch(0, (), (NewSequence(1, (5, 6, 7), (), GREEDY),), (Slice(1, 0, (5, 6, 7), True),)), table
        )
        again = NewSequence(1, (5, 6, 7), first.token_ids, GREEDY)
        tokens = (5, 6, 7, *first.token_ids)
        second = engine.step(Batch(1, (1,), (again,), (Slice(1, 0, tokens, True),)), [(9, 4)])
        assert [*first.token_ids, *second.token_ids] == undisturbed.chosen[:2]


def test_results_are_aligned_with_the_slices_that_sample(model_dir: Path) -> None:
    with engine_of(model_dir) as engine:
        wanted = [Job(i, (10 + i,) * (1 + i), 1) for i in range(6)]
        generate(engine, wanted, at_once=1)
        order = [4, 0, 5, 2, 1, 3]
        added = tuple(NewSequence(i, wanted[i].prompt, (), GREEDY) for i in range(6))
        slices = tuple(Slice(i, 0, wanted[i].prompt, i != 5) for i in order)
        result = engine.step(Batch(7, (), added, slices), [(i,) for i in order])
        assert result.step_id == 7
        assert list(result.token_ids) == [wanted[i].chosen[0] for i in order if i != 5]
        assert len(result.logprobs) == 5
        assert result.execute_s > 0


def test_a_launched_step_computes_tokens_that_the_host_does_not_know_yet(model_dir: Path) -> None:
    """One sequence joins later, and one is removed while its last row is being computed."""
    with engine_of(model_dir) as engine:
        jobs = sampled_jobs(3)
        generate(engine, jobs, at_once=1)
        tables = [tuple(range(8 * i, 8 * i + 8)) for i in range(3)]
        counts = [0, 0, 0]  # tokens in steps launched so far
        chosen: list[list[int]] = [[], [], []]
        before: tuple[Batch, LaunchedStep] | None = None
        for number, ids in enumerate([(0, 1), (1, 0), (2, 1, 0), (0, 1, 2), (2, 1), (1, 2)]):
            new = [i for i in ids if not counts[i]]
            slices = tuple(
                Slice(i, 0, jobs[i].prompt, True)
                if i in new
                else Slice(i, len(jobs[i].prompt) + counts[i] - 1, (IN_FLIGHT,), True)
                for i in ids
            )
            added = tuple(NewSequence(i, jobs[i].prompt, (), jobs[i].sampling) for i in new)
            batch = Batch(number, (0,) if number == 4 else (), added, slices)
            launched = engine.runner.launch(batch, [tables[i] for i in ids])
            for i in ids:
                counts[i] += 1
            if before is not None:
                for part, token_id in zip(before[0].slices, before[1].collect().token_ids, strict=True):
                    chosen[part.sequence_id].append(token_id)
            before = batch, launched
        assert [len(tokens) for tokens in chosen] == [4, 5, 3]
        for job, tokens in zip(jobs, chosen, strict=True):
            assert tokens == job.chosen[: len(tokens)]
        engine.runner.forget_all()
        alone = Batch(9, (), (NewSequence(0, (5,), (), GREEDY),), (Slice(0, 0, (IN_FLIGHT,), True),))
        with pytest.raises(InvariantViolation, match="no step that samples"):
            engine.step(alone, tables[:1])


def test_the_first_batch_may_have_nothing_to_sample(model_dir: Path) -> None:
    """Computes the first chunk of a long prompt on a worker that has just started."""
    with engine_of(model_dir) as engine:
        new = NewSequence(1, (5, 6, 7), (), GREEDY)
        result = engine.step(Batch(0, (), (new,), (Slice(1, 0, (5, 6), False),)), [(0,)])
        assert result.token_ids == ()


def test_an_empty_batch_only_removes_sequences(model_dir: Path) -> None:
    with engine_of(model_dir) as engine:
        engine.step(Batch(0, (), (NewSequence(1, (5,), (), GREEDY),), ()), [])
        assert engine.runner.sequence_ids == (1,)
        result = engine.step(Batch(1, (1, 99), (), ()), [])
        assert (result.token_ids, result.logprobs) == ((), ())
        assert engine.runner.sequence_ids == ()


def test_a_block_that_does_not_exist_is_reported_as_a_bug(model_dir: Path) -> None:
    with engine_of(model_dir) as engine, pytest.raises(InvariantViolation, match="is used, but there are"):
        engine.step(
            Batch(0, (), (NewSequence(1, (5,), (), GREEDY),), (Slice(1, 0, (5,), True),)), [(engine.block_count,)]
        )


@pytest.mark.parametrize("kernels", KERNELS)
def test_blocks_of_the_other_window_give_the_same_tokens(model_dir: Path, kernels: str) -> None:
    """As on a stage of two groups, the old group's KV stays in the first window while the new group uses the second."""
    with load_engine(model_dir, dtype="float32", device_memory_bytes=16 << 20, kernels=kernels) as engine:
        memory = engine.memory
        first, second, third = (sampled_jobs(8) for _ in range(3))
        generate(engine, first, chunk_tokens=9)
        memory.make_room_for_layers([], block_count=memory.leaving_block_count)
        memory.open_window()
        kept = [memory.kv.layer(layer)[: memory.kv.windows[0].block_count].clone() for layer in range(2)]
        generate(engine, second, at_once=2, chunk_tokens=9)
        assert all(torch.equal(memory.kv.layer(layer)[: len(kept[layer])], kept[layer]) for layer in range(2))
        memory.close_leaving()
        generate(engine, third, chunk_tokens=9)
        assert [job.chosen for job in third] == [job.chosen for job in second] == [job.chosen for job in first]
        engine.check()
