"""Validation of values from other processes, where they are received.

The codec calls these functions, so that no plain type is made from an invalid message. The receiver of an invalid
message reports its sender (`ballast.service.refusals`) and continues. Except where noted, the functions return nothing
and raise InvalidRequest for `field`.
"""

from collections.abc import Collection
from typing import Final

from ballast.common.errors import InvalidRequest
from ballast.common.load import MemoryReport

MAX_ID_CHARS: Final = 128
MAX_TEXT_CHARS: Final = 1024  # limit of model names and reasons
MAX_ADDRESS_CHARS: Final = 512
MAX_LAYERS: Final = 10_000
MAX_MEMBERS: Final = 1024  # limit on the members of one group
MAX_GROUPS: Final = 1 << 16  # no fewer than the instances that a monitor admits
MAX_BYTES: Final = 1 << 50  # limit of one instance; sums over thousands of instances fit into an int64
# Limit of a layout's epoch, which grows by one with each change.
MAX_EPOCH: Final = 1 << 52
# An epoch claimed by an instance is limited to the larger of this and the epoch of the layout in force plus
# CLAIM_SLACK. Any accepted claim therefore leaves room for all future changes.
MAX_CLAIMED_EPOCH: Final = 1 << 48
CLAIM_SLACK: Final = 1 << 20
MAX_SECONDS: Final = 1e9


def name(field: str, text: str) -> str:
    """Validate and return an id, which becomes a key, a label and part of log lines.

    Raises:
        InvalidRequest: the id is empty, too long, or has spaces or unprintable characters.
    """
    if not 0 < len(text) <= MAX_ID_CHARS:
        raise InvalidRequest(field, f"must have 1 to {MAX_ID_CHARS} characters, has {len(text)}")
    if not text.isprintable() or " " in text:
        raise InvalidRequest(field, f"must not contain blanks or unprintable characters, got {text!r}")
    return text


def text(field: str, value: str, most_chars: int = MAX_TEXT_CHARS) -> str:
    """Validate and return human-readable text."""
    if len(value) > most_chars:
        raise InvalidRequest(field, f"has {len(value)} characters, at most {most_chars} are allowed")
    return value


def address(field: str, value: str) -> str:
    """Validate and return an address of the form host:port."""
    host, _, port = value.rpartition(":")
    fits = host and host.isprintable() and " " not in host and len(value) <= MAX_ADDRESS_CHARS
    if not (fits and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16):
        raise InvalidRequest(field, f"must be host:port, got {value[:MAX_ADDRESS_CHARS]!r}")
    return value


def within(field: str, value: float, least: float, most: float) -> None:
    """Validate that a value is in `[least, most]`. NaN is outside every range."""
    if not least <= value <= most:
        raise InvalidRequest(field, f"must be from {least:g} to {most:g}, got {value}")


def none_negative(field: str, values: Collection[int]) -> None:
    if min(values) < 0:
        raise InvalidRequest(field, f"must not be negative, got {min(values)}")


def count(field: str, values: Collection[object], most: int) -> None:
    if len(values) > most:
        raise InvalidRequest(field, f"has {len(values)} entries, at most {most} are allowed")


def distinct(field: str, values: Collection[str]) -> None:
    if len(set(values)) != len(values):
        twice = next(value for value in values if list(values).count(value) > 1)
        raise InvalidRequest(field, f"names {twice!r} twice")


def adds_up(field: str, memory: MemoryReport) -> None:
    """Validate that parameters + KV + free = budget. The codec does not validate this, because `ballast status` shows
    violations.
    """
    if memory.parameter_bytes + memory.kv_bytes + memory.free_bytes != memory.budget_bytes:
        raise InvalidRequest(field, f"parameters, KV and free must add up to the budget: {memory}")


def claimed_epoch(field: str, epoch: int, layout_epoch: int) -> None:
    """Reject an implausibly large epoch claimed by an instance: above MAX_CLAIMED_EPOCH and more than CLAIM_SLACK
    beyond the layout in force.
    """
    within(field, epoch, 0, max(MAX_CLAIMED_EPOCH, layout_epoch + CLAIM_SLACK))
