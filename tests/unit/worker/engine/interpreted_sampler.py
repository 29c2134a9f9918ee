"""Compares the GPU's sampler with torch's on the CPU. Run it as a program with TRITON_INTERPRET=1."""

import math
import os
import random
import tempfile
from pathlib import Path

import pytest
import torch

from ballast.common.sampling import Grammar, GrammarKind, SamplingParams
from ballast.service.grammar import Grammars
from services.worker.core.batch import NewSequence
from services.worker.engine import sampler_gpu
from services.worker.engine.sampler import AnySampler, Sampled, Sampler, SampleRow
from services.worker.engine.sampler_gpu import GpuSampler
from services.worker.engine.upload import upload
from tools.model.tokenizer import train_tokenizer

CPU = torch.device("cpu")


def sample(sampler: AnySampler, rows: list[SampleRow], logits_RV: torch.Tensor) -> Sampled:
    """Samples one step on the device of the logits."""
    with torch.inference_mode():
        prepared = sampler.prepare(rows)
        return prepared.launch(upload(prepared.arrays, logits_RV.device), logits_RV.clone()).collect()


def requests(count: int, vocabulary: int, seed: int) -> list[NewSequence]:
    rng = random.Random(seed)
    made: list[NewSequence] = []
    for i in range(count):
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.3, 0.8, 1.0, 1.7]),
            top_k=rng.choice([0, 0, 1, 5, 50, 1000]),
            top_p=rng.choice([1.0, 1.0, 0.999, 0.95, 0.5, 1e-3]),
            min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
            seed=rng.randrange(2**40),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
            presence_penalty=rng.choice([0.0, 0.0, 0.7]),
            min_tokens=rng.choice([0, 0, 9]),
            logit_bias=rng.choice([{}, {}, {5: 2.0, 9: -3.0, 2: 1.0}]),
            bad_words_token_ids=rng.choice([(), (), ((5,), (7, 8), (1,) * 99)]),
            allowed_token_ids=rng.choice([(), (), tuple(range(1, vocabulary, 3))]),
            logprobs=rng.choice([None, None, 0, 4]),
        )
        prompt, output = (tuple(rng.choices(range(vocabulary), k=k)) for k in (6, rng.randrange(4)))
        made.append(NewSequence(i, prompt, output, sampling))
    return made


def logits_of(rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    """Flat and peaked rows, some with equal logits and some with impossible tokens."""
    torch.manual_seed(seed)
    logits_RV = torch.randn(rows, vocabulary) * torch.rand(rows, 1) * 6
    logits_RV[::5] = logits_RV[::5].round()
    logits_RV[1::7, ::3] = -math.inf
    return logits_RV


def compare(rows: int, vocabulary: int, seed: int, *, steps: int, device: torch.device = CPU) -> int:
    """The number of differing tokens. Also checks that log-probabilities are equal up to rounding."""
    cpu, gpu = Sampler(vocabulary, [2], CPU), GpuSampler(vocabulary, [2], device)
    added, differing = requests(rows, vocabulary, seed), 0
    for new in added:
        cpu.add(new)
        gpu.add(new)
    for step in range(steps):
        logits_RV = logits_of(rows, vocabulary, seed + step)
        order = random.Random(step).sample(added, rows - step)
        asked = [SampleRow(s.sequence_id, len(s.prompt_token_ids) + len(s.output_token_ids) + step) for s in order]
        logits_RV = logits_RV[: len(asked)]
        expected, given = sample(cpu, asked, logits_RV), sample(gpu, asked, logits_RV.to(device))
        for a, b, of_a, of_b in zip(
            expected.token_ids, given.token_ids, expected.logprobs, given.logprobs, strict=True
        ):
            differing += a != b
            assert (of_a is None) == (of_b is None)
            if of_a is not None and of_b is not None and a == b:
                assert of_b.logprob == pytest.approx(of_a.logprob, abs=1e-5)
                values = [value for _, value in of_a.top]
                assert [value for _, value in of_b.top] == pytest.approx(values, abs=1e-5)
    return differing


def require_tokens_of_what_is_no_number(device: torch.device = CPU) -> None:
    vocabulary = 40
    filters = ({}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.5})
    for value in (math.inf, -math.inf, math.nan):
        gpu = GpuSampler(vocabulary, [2], device)
        for i, given in enumerate((*filters, {"temperature": 0.0})):
            gpu.add(NewSequence(i, (1,), (), SamplingParams(seed=i, **given)))  # pyright: ignore[reportArgumentType]
        for broken in (slice(0, vocabulary), slice(3, 4), slice(10, vocabulary)):
            logits_RV = torch.zeros(6, vocabulary)
            logits_RV[:, broken] = value
            chosen = sample(gpu, [SampleRow(i, 2) for i in range(6)], logits_RV.to(device)).token_ids
            assert all(0 <= token < vocabulary for token in chosen)
            if value == math.inf:  # only tokens with an infinite logit
                assert all(token in range(*broken.indices(vocabulary)) for token in chosen)


def require_small_changes(device: torch.device = CPU) -> None:
    """Changes that are lost if bfloat16 logits are changed in place, whose steps are 1/8 from 16 to 32."""
    gpu, logits_RV = GpuSampler(40, [2], device), torch.zeros(3, 40, dtype=torch.bfloat16)
    logits_RV[:, [5, 7]] = 20.0
    gpu.add(NewSequence(0, (1,), (), SamplingParams(temperature=0.0)))
    gpu.add(NewSequence(1, (1,), (), SamplingParams(temperature=0.0, logit_bias={7: 0.05})))
    gpu.add(NewSequence(2, (1,), (5,), SamplingParams(temperature=0.0, frequency_penalty=0.05)))
    rows = [SampleRow(i, 1) for i in range(3)]
    assert sample(gpu, rows, logits_RV.to(device)).token_ids == (5, 7, 7)


def require_grammars(device: torch.device = CPU) -> None:
    """A grammar that is followed, an invalid one, and none: results and error texts equal those of the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        train_tokenizer(300, qwen=False).save(str(file))
        grammars = Grammars(file, 300, [2])
        cpu, gpu = Sampler(300, [2], CPU, grammars), GpuSampler(300, [2], device, grammars)
        texts = (Grammar(GrammarKind.LARK, 'start: "a" "b" "c"'), Grammar(GrammarKind.REGEX, "("), None)
        for i, grammar in enumerate(texts):
            for sampler in (cpu, gpu):
                sampler.add(NewSequence(i, (5, 6), (), SamplingParams(temperature=0.0, grammar=grammar)))
        for step in range(4):
            rows, logits_RV = [SampleRow(i, 2 + step) for i in range(3)], logits_of(3, 300, step)
            expected, given = sample(cpu, rows, logits_RV), sample(gpu, rows, logits_RV.to(device))
            assert given == expected
            assert [row for row, _ in given.errors] == [1]


def require_the_best_put_aside(device: torch.device = CPU) -> None:
    """The best candidates must be collected even if nearly all other logits are equal and too many to collect."""
    gpu, logits_RV = GpuSampler(600, [2], device), torch.zeros(1, 600)
    logits_RV[0, 40:70] = torch.arange(1.0, 31.0)
    gpu.add(NewSequence(0, (1,), (), SamplingParams(seed=1, top_k=5, top_p=0.9)))
    assert sample(gpu, [SampleRow(0, 1)], logits_RV.to(device)).token_ids[0] in range(65, 70)
    [[_, found, _, _]] = gpu._scratch[1][:1].tolist()
    assert 5 <= found <= 30


def main() -> None:
    # Small programs are interpreted faster. With few candidates, many rows need a pass over the whole vocabulary.
    sampler_gpu._ADJUSTED, sampler_gpu._TILE = 512, 256
    assert compare(16, 600, 1, steps=2) == 0
    sampler_gpu._LEAST, sampler_gpu._ROOM = 16, 32
    assert compare(16, 600, 3, steps=2) == 0
    require_the_best_put_aside()
    require_tokens_of_what_is_no_number()
    require_small_changes()
    require_grammars()


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    main()
