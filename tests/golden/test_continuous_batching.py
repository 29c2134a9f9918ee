"""Greedy tokens under continuous batching equal those of `transformers`, despite random arrivals, cancellations and
preemptions.

The reference model runs once over each sequence (the prompt and our output), and each of our tokens must be its argmax
at that position. This is as strict as letting it generate, since the first deviation fails.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ballast.common.sampling import FinishReason, SamplingParams
from ballast.service.tokenizer import load_tokenizer
from services.worker.engine.load import load_engine
from tests.golden.conftest import MAX_LEN, CheckpointMaker
from tests.support.engine_loop import Answer, EngineLoop
from tests.support.reference import NEAR_TIE, reference_model

pytestmark = [pytest.mark.golden]

ARCHITECTURES = ("llama", "llama3", "mistral", "qwen2", "qwen3")
PROMPTS = 200
VOCAB = 512
MEMORY_BYTES = 32 << 20
CANCELLED_FRACTION = 0.15
MAX_NEAR_TIE_FRACTION = 1e-3  # a larger fraction would indicate a real error
REFERENCE_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Setting:
    chunk_tokens: int
    running: int
    blocks: int


SETTINGS = (
    Setting(chunk_tokens=7, running=7, blocks=33),  # KV for slightly more than one request of maximum length
    Setting(chunk_tokens=64, running=32, blocks=36),
    Setting(chunk_tokens=512, running=64, blocks=400),
)


def prompt_lengths(rng: random.Random) -> list[int]:
    """Random lengths, from one token to one less than the model's maximum, skewed towards short prompts."""
    edges = [1, 2, 6, 7, 8, 15, 16, 17, 63, 64, 65, 255, 256, MAX_LEN - 65, MAX_LEN - 2, MAX_LEN - 1]
    return edges + [min(MAX_LEN - 1, int(rng.expovariate(1 / 32)) + 1) for _ in range(PROMPTS - len(edges))]


class Traffic:
    """Submits requests at random times, sometimes more than can run, and cancels some while they wait or run."""

    def __init__(self, loop: EngineLoop, seed: int) -> None:
        self._loop, self._rng = loop, random.Random(seed)
        self._todo = prompt_lengths(self._rng)
        self._rng.shuffle(self._todo)
        self._to_cancel: list[tuple[Answer, int]] = []  # each with its output token count at cancellation
        self.answers: list[Answer] = []

    def __call__(self) -> bool:
        rng = self._rng
        if self._todo and rng.random() < 0.5 and self._loop.load().waiting_count < 8:
            for _ in range(min(len(self._todo), rng.choice((1, 1, 2, 4, 20)))):
                self._submit(self._todo.pop())
        for answer, token_count in self._to_cancel:
            if len(answer.token_ids) >= token_count and rng.random() < 0.3:
                self._loop.abort(answer)
        self._to_cancel = [(answer, n) for answer, n in self._to_cancel if answer.ending is None]
        return bool(self._todo)

    def _submit(self, length: int) -> None:
        rng = self._rng
        prompt = [rng.randrange(5, VOCAB) for _ in range(length)]
        sampling = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 24), ignore_eos=rng.random() < 0.5)
        answer = self._loop.submit(prompt, sampling, wants_text=False)
        self.answers.append(answer)
        if rng.random() < CANCELLED_FRACTION:
            self._to_cancel.append((answer, rng.choice((0, 0, 1, 3))))


def near_ties(model_dir: Path, dtype: str, answers: list[Answer]) -> int:
    """The number of tokens that differ where the reference's top two logits nearly tie; any other difference fails."""
    count = 0
    rows = sorted((answer for answer in answers if answer.token_ids), key=lambda a: len(a.prompt) + len(a.token_ids))
    while rows:
        room = max(1, REFERENCE_BATCH_TOKENS // (len(rows[-1].prompt) + len(rows[-1].token_ids)))
        batch, rows = rows[-room:], rows[:-room]
        count += sum(map(_differing, batch, _reference_logits(model_dir, dtype, batch)))
    return count


@torch.inference_mode()
def _reference_logits(model_dir: Path, dtype: str, answers: list[Answer]) -> list[torch.Tensor]:
    """The reference's logits at each output position of each answer. Causal attention ignores the right padding."""
    ids = [[*answer.prompt, *answer.token_ids[:-1]] for answer in answers]
    width = max(map(len, ids))
    logits = reference_model(model_dir, dtype)(torch.tensor([row + [0] * (width - len(row)) for row in ids])).logits
    return [logits[i, len(a.prompt) - 1 : len(ids[i])] for i, a in enumerate(answers)]


def _differing(answer: Answer, logits: torch.Tensor) -> int:
    best = logits.topk(2)
    count = 0
    for at, token_id in enumerate(answer.token_ids):
        wanted, gap = int(best.indices[at, 0]), float(best.values[at, 0] - best.values[at, 1])
        if token_id != wanted:
            assert gap < NEAR_TIE, (
                f"prompt of {len(answer.prompt)} tokens, output {at}: {token_id} instead of {wanted}, better by {gap}"
            )
            count += 1
    return count


def check_ending(answer: Answer, eos_token_ids: tuple[int, ...]) -> None:
    assert answer.ending is not None
    tokens, sampling = answer.token_ids, answer.sampling
    stops = () if sampling.ignore_eos else eos_token_ids
    assert not set(tokens[:-1]) & set(stops)
    room = min(sampling.max_tokens, MAX_LEN - len(answer.prompt))
    match answer.ending.finish_reason:
        case FinishReason.STOP:
            assert tokens[-1] in stops
            assert answer.ending.matched_stop == str(tokens[-1])
        case FinishReason.LENGTH:
            assert len(tokens) == room
        case FinishReason.CANCELLED:
            assert len(tokens) < room
        case reason:
            raise AssertionError(f"ended with {reason}: {answer.ending.error}")


def was_cancelled(answer: Answer) -> bool:
    return answer.ending is not None and answer.ending.finish_reason is FinishReason.CANCELLED


@pytest.mark.rotating
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tokens_under_random_arrival_and_cancellation(checkpoint: CheckpointMaker, arch: str, dtype: str) -> None:
    model_dir = checkpoint(arch, False)
    tokenizer = load_tokenizer(model_dir)
    with load_engine(model_dir, dtype=dtype, device_memory_bytes=MEMORY_BYTES) as engine:
        preemptions = 0
        for seed, setting in enumerate(SETTINGS):
            loop = EngineLoop(
                engine,
                tokenizer,
                block_count=setting.blocks,
                max_running_count=setting.running,
                max_batch_tokens=setting.chunk_tokens,
            )
            traffic = Traffic(loop, seed)
            loop.run(traffic)
            loop.finish()
            answers = traffic.answers
            for answer in answers:
                check_ending(answer, engine.info.eos_token_ids)
            cancelled = [len(a.token_ids) for a in answers if was_cancelled(a)]
            assert len(answers) == PROMPTS
            assert min(cancelled) == 0
            assert max(cancelled) > 0
            preemptions += loop.core.totals.preemptions
            differing = near_ties(model_dir, dtype, answers)
            tokens = sum(len(answer.token_ids) for answer in answers)
            print(f"{arch} {dtype}, chunks of {setting.chunk_tokens}: {tokens} tokens, {differing} near-ties")  # -rP
            assert differing <= (MAX_NEAR_TIE_FRACTION * tokens if dtype == "float32" else 0)
        assert preemptions >= 5
