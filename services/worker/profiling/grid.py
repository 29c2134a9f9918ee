"""The measured batches: a grid for fitting the cost model, and held-out ones for its errors."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from ballast.common.cost import Chunk

Batch = tuple[Chunk, ...]
_LEAST_CHUNK = 8
_PREFIXES = (64, 256, 1024, 4096, 16_384)
_CONTEXTS = (16, *_PREFIXES)
_MIXED_SHARE = 3  # number of other batches per mixed batch
_MAX_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class GridLimits:
    """Maxima of a batch; `kv_tokens` counts all its sequences, prefixes included."""

    batch_tokens: int
    sequences: int
    model_len: int
    kv_tokens: int

    def allow(self, batch: Batch) -> bool:
        longest = max(prefix + count for prefix, count in batch)
        return (
            sum(chunk.token_count for chunk in batch) <= self.batch_tokens
            and len(batch) <= self.sequences
            and longest <= self.model_len
            and sum(prefix + count for prefix, count in batch) <= self.kv_tokens
        )


def grid(limits: GridLimits, rng: random.Random) -> list[Batch]:
    """Return prefills, chunks after a prefix, decodes and mixtures, in random order, so that any part is a sample."""
    batches = [*_chunks(limits), *_decodes(limits)]
    batches = [batch for batch in batches if limits.allow(batch)]
    batches += [_mixed(limits, rng) for _ in range(len(batches) // _MIXED_SHARE)]
    rng.shuffle(batches)
    return batches


def held_out(limits: GridLimits, rng: random.Random, *, prefix: bool, count: int) -> list[Batch]:
    """Return `count` batches of random sizes, independent of the grid. With a prefix: chunks and decodes."""
    batches: list[Batch] = []
    while len(batches) < count:
        batches.append(_mixed(limits, rng) if prefix else _prefills(limits, rng))
    return batches


def _chunks(limits: GridLimits) -> Iterator[Batch]:
    for count in _powers(2, _LEAST_CHUNK, limits.batch_tokens):
        yield (Chunk(0, count),)
        if count >= 2 * _LEAST_CHUNK:
            yield (Chunk(0, count // 2),) * 2  # the same number of tokens, but half of the attention pairs
    for prefix, count in itertools.product(_PREFIXES, _powers(4, _LEAST_CHUNK, limits.batch_tokens)):
        yield (Chunk(prefix, count),)


def _decodes(limits: GridLimits) -> Iterator[Batch]:
    for context, sequences in itertools.product(_CONTEXTS, _powers(4, 1, limits.sequences)):
        yield (Chunk(context, 1),) * sequences


def _mixed(limits: GridLimits, rng: random.Random) -> Batch:
    """Return a batch of decodes of various lengths with chunks, at least one of which has a prefix."""
    while True:
        decodes = _log_uniform(rng, 1, limits.sequences) if rng.random() < 0.8 else 0
        batch = tuple(Chunk(_log_uniform(rng, 8, limits.model_len - 1), 1) for _ in range(decodes))
        room = limits.batch_tokens - decodes
        for _ in range(rng.randrange(_MAX_CHUNKS)):
            if room < _LEAST_CHUNK:
                break
            count = _log_uniform(rng, _LEAST_CHUNK, room)
            prefix = _log_uniform(rng, 16, limits.model_len) if rng.random() < 0.7 else 0
            batch += (Chunk(prefix, count),)
            room -= count
        if any(chunk.prefix_tokens for chunk in batch) and limits.allow(batch):
            return batch


def _prefills(limits: GridLimits, rng: random.Random) -> Batch:
    while True:
        wanted = _log_uniform(rng, _LEAST_CHUNK, limits.batch_tokens)
        cuts = sorted(rng.randrange(1, wanted) for _ in range(rng.randrange(_MAX_CHUNKS)))
        lengths = [end - begin for begin, end in itertools.pairwise([0, *cuts, wanted])]
        batch = tuple(Chunk(0, length) for length in lengths if length)
        if limits.allow(batch):
            return batch


def _powers(base: int, first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= base


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(low * (max(low, high) / low) ** rng.random())
