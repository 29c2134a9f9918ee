"""Answers of an emulated model: each token is a function of all tokens before it.

An answer can therefore be verified from its prompt, and a lost, repeated or foreign token changes all following tokens.
"""

import sys
import zlib
from array import array
from collections.abc import Sequence

_WORD = "i" if array("i").itemsize == 4 else "l"
_SPREAD = 2654435761  # 2 ** 32 divided by the golden ratio: spreads neighbouring numbers
_WRONG = 0x5BD1E995


def prefix_hash(token_ids: Sequence[int], before: int = 0) -> int:
    """Return a 32-bit hash of a prefix that ends with `token_ids`. `before`: the hash of the tokens before them."""
    words = array(_WORD, token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return zlib.crc32(words, before)


def next_token(before: int, position: int, vocab_size: int) -> int:
    """Return the token at `position`, after a prefix with the hash `before`."""
    mixed = ((before ^ position) * _SPREAD) & 0xFFFFFFFF
    return (mixed ^ mixed >> 15) % vocab_size


def wrong_token(right: int, vocab_size: int) -> int:
    """Return a token other than `right`, sampled if KV or parameters were wrong."""
    return (right + 1 + _WRONG % (vocab_size - 1)) % vocab_size


def answer(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """Return the correct answer of `count` tokens."""
    before, tokens = prefix_hash(prompt), list[int]()
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(next_token(before, position, vocab_size))
        before = prefix_hash(tokens[-1:], before)
    return tokens
