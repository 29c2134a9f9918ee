"""Prefix marks: 8-byte identifiers of prompt prefixes, shared by workers and dispatchers.

A mark identifies all tokens of a prompt up to a multiple of MARK_TOKENS. Prompts share marks as far as they share
tokens; a collision has probability 2^-64 and costs a recomputation, never a wrong token.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

MARK_TOKENS = 256

Mark = int


def first_mark(salt: bytes) -> Mark:
    """The start of a chain of marks. Prompts with different salts have different chains, so they share no mark."""
    return _digest(salt) if salt else 0


def mark_after(before: Mark, token_ids: Sequence[int]) -> Mark:
    """Next mark of a chain. `token_ids`: the MARK_TOKENS tokens after those covered by `before`."""
    return _digest(before.to_bytes(8, "little") + array("I", token_ids).tobytes())


def marks_of(token_ids: Sequence[int], salt: bytes = b"") -> tuple[Mark, ...]:
    mark, marks = first_mark(salt), list[Mark]()
    for end in range(MARK_TOKENS, len(token_ids) + 1, MARK_TOKENS):
        mark = mark_after(mark, token_ids[end - MARK_TOKENS : end])
        marks.append(mark)
    return tuple(marks)


def _digest(data: bytes) -> Mark:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
