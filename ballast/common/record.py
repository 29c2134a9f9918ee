"""Immutable records that are cheap to create, because engines create some for every step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(*, kw_only: bool = False) -> Callable[[type[_T]], type[_T]]:
    """Decorator for a dataclass with slots whose immutability is enforced by the type checker only.

    `frozen=True` sets each field through `object.__setattr__`, which dominates the cost of creating one. Assignments
    are therefore not refused at run time.
    """
    return dataclass(slots=True, kw_only=kw_only, unsafe_hash=True)
