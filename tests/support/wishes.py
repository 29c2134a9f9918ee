"""Random requests, many of which share prefixes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ballast.common.sampling import SamplingParams

_STOPS = ((), (), ("e",), ("the", "\n"), ("ab", "a b"))


@dataclass(frozen=True, slots=True)
class Wish:
    prompt: tuple[int, ...]
    sampling: SamplingParams


def make_wishes(count: int, seed: int) -> list[Wish]:
    """Random prompts, half of the longer ones with a common prefix, and random sampling parameters."""
    rng = random.Random(seed)
    trunks = [_tokens(rng, 90) for _ in range(3)]
    return [_wish(rng, i, trunks[i % 3][: rng.choice([0, 0, 30, 85])]) for i in range(count)]


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(5, 500) for _ in range(count))


def _wish(rng: random.Random, seed: int, trunk: tuple[int, ...]) -> Wish:
    penalised = rng.random() < 0.3
    sampling = SamplingParams(
        temperature=0.0 if rng.random() < 0.5 else rng.uniform(0.5, 1.5),
        seed=seed,
        max_tokens=rng.randint(1, 60),
        top_k=rng.choice([0, 0, 20]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        repetition_penalty=1.2 if penalised else 1.0,
        presence_penalty=0.3 if penalised else 0.0,
        frequency_penalty=0.2 if penalised else 0.0,
        stop=rng.choice(_STOPS),
        ignore_eos=rng.random() < 0.7,
        logprobs=rng.choice([None, None, None, 0, 2]),
    )
    if sampling.logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=(None, 0, 2)[seed % 3])
    if seed % 5 == 2:
        allowed, bad = tuple(range(seed % 3, 500, 2)), tuple((a, b) for a in range(5, 60) for b in (a, a + 2))
        sampling = replace(sampling, allowed_token_ids=allowed, bad_words_token_ids=((7,), *bad))
    prompt = _tokens(rng, rng.choice([1, 3, 20, 40, 90]))
    return Wish((*trunk[: len(prompt) - 1], *prompt[len(trunk) :]) if len(prompt) > len(trunk) else prompt, sampling)


def alike(wishes: Sequence[Wish]) -> list[int]:
    """Indices of wishes whose first 30 tokens occur in several prompts."""
    beginnings = [wish.prompt[:30] for wish in wishes]
    return [i for i, beginning in enumerate(beginnings) if len(beginning) == 30 and beginnings.count(beginning) > 1]
