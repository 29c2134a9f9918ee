"""The answers of an emulated model: each token follows from all tokens before it, and from nothing else.

So an answer can be checked by whoever has the prompt, and a token that was lost, repeated or taken from somebody else
on the way changes all that follow.
"""

import sys
import zlib
from array import array
from collections.abc import Sequence

_WORD = "i" if array("i").itemsize == 4 else "l"
_SPREAD = 2654435761  # neighbours far from each other: 2 ** 32 by the golden ratio
_WRONG = 0x5BD1E995


def prefix_hash(token_ids: Sequence[int], before: int = 0) -> int:
    """32 bits over all tokens so far; `before` is that of those in front, wherever the cut lies."""
    words = array(_WORD, token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return zlib.crc32(words, before)


def next_token(before: int, position: int, vocab_size: int) -> int:
    """The token at `position` behind a prefix with that hash."""
    mixed = ((before ^ position) * _SPREAD) & 0xFFFFFFFF
    return (mixed ^ mixed >> 15) % vocab_size


def wrong_token(right: int, vocab_size: int) -> int:
    """What is said instead when the KV or the layers were not what they should have been: another one."""
    return (right + 1 + _WRONG % (vocab_size - 1)) % vocab_size


def answer(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The right answer of `count` tokens."""
    before, tokens = prefix_hash(prompt), list[int]()
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(next_token(before, position, vocab_size))
        before = prefix_hash(tokens[-1:], before)
    return tokens
