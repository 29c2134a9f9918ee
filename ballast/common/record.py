"""Immutable records that are made for every step of every engine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(*, kw_only: bool = False) -> Callable[[type[_T]], type[_T]]:
    """A frozen dataclass with slots, where the type checker does the freezing.

    `frozen=True` sets each field through `object.__setattr__`, which takes most of the time that it takes to make one.
    Nobody may rely on an assignment being refused at run time.
    """
    return dataclass(slots=True, kw_only=kw_only, unsafe_hash=True)
