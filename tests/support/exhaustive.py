"""Breadth-first search over all states that pure cores can reach with a small model of their surroundings."""

import functools
import io
import pickle
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import FunctionType
from typing import Any, Protocol


class World(Protocol):
    """A state. Actions modify it, so the search copies it first."""

    def actions(self) -> Iterable[tuple[str, Callable[[Any], None]]]:
        """All actions possible in this state, by name; each is called with a copy of this world."""
        ...

    def check(self) -> None:
        """Raises AssertionError or InvariantViolation if a promise is broken in this state."""
        ...

    def check_end(self) -> None:
        """Like `check`, for a state in which only faults are possible."""
        ...

    def key(self) -> object:
        """The parts of the state that `frozen` compares."""
        ...


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    states: int
    ends: int
    whole: bool  # all states were reached before the limit
    depth: int


class Broken(AssertionError):
    """A promise is broken. The message contains the shortest sequence of actions that leads to the state."""


def search(first: Any, limit: int) -> Found:
    """Visits at most `limit` states.

    Raises:
        Broken: a promise is broken in a reachable state; the message lists the actions that lead to it.
    """
    seen: dict[int, tuple[int, str] | None] = {(key := hash(frozen(first.key()))): None}
    waiting = deque([(first, key, 0)])
    ends = deepest = 0
    while waiting:
        world, key, depth = waiting.popleft()
        deepest = max(deepest, depth)
        found = list(world.actions())
        if not any(not name.startswith("fault") for name, _ in found):
            ends += 1
            _judge(world.check_end, seen, key)
        before = _Original(world)
        for name, act in found:
            after = before.copy()

            def run(act: Callable[[Any], None] = act, after: Any = after) -> None:
                act(after)
                after.check()

            _judge(run, seen, key, name)
            if (reached := hash(frozen(after.key()))) not in seen:
                seen[reached] = key, name
                if len(seen) >= limit:
                    return Found(len(seen), ends, False, deepest)
                waiting.append((after, reached, depth + 1))
    return Found(len(seen), ends, True, deepest)


class _Original:
    """A value to be copied many times. Copies share functions and immutable records."""

    def __init__(self, value: object) -> None:
        self._shared: list[object] = []
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = self._share  # pyright: ignore[reportAttributeAccessIssue]
        pickler.dump(value)
        self._data = buffer.getvalue()

    def _share(self, value: object) -> int | None:
        kind = type(value)
        if kind is FunctionType or (_is_record(kind) and _is_immutable(value)):
            self._shared.append(value)
            return len(self._shared) - 1
        return None

    def copy(self) -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(self._data))
        unpickler.persistent_load = self._shared.__getitem__  # pyright: ignore[reportAttributeAccessIssue]
        return unpickler.load()


def _judge(look: Callable[[], None], seen: dict[int, tuple[int, str] | None], key: int, last: str = "") -> None:
    try:
        look()
    except Exception as error:
        steps = [last] if last else []
        while (before := seen[key]) is not None:
            key, name = before
            steps.append(name)
        raise Broken(f"{type(error).__name__}: {error}\nafter " + "\n      ".join(reversed(steps))) from error


def frozen(value: object, *, now_s: float = 0.0, unseen: Collection[str] = (), _above: tuple[int, ...] = ()) -> object:
    """A hashable value that is equal for objects of equal content. A reference to an enclosing object becomes its
    depth, and a float (a time) becomes whether it is later than `now_s`. Fields named in `unseen` are left out.
    """
    if isinstance(value, float):
        return value > now_s
    if value is None or isinstance(value, (bool, int, str, bytes, Enum)):
        return value
    if id(value) in _above:
        return "above", _above.index(id(value))
    above = (*_above, id(value))

    def inside(one: object) -> object:
        return frozen(one, now_s=now_s, unseen=unseen, _above=above)

    kind = type(value).__name__
    if _is_record(type(value)) and _is_immutable(value):
        return value
    if isinstance(value, dict):
        return kind, tuple((inside(k), inside(v)) for k, v in value.items())
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(map(inside, value))
    if isinstance(value, (list, tuple, deque)):
        return kind, tuple(map(inside, value))
    if callable(value) and hasattr(value, "__name__"):
        return kind, value.__name__
    names = [field.name for field in fields(value)] if is_dataclass(value) else _names_of(value)
    return kind, tuple((name, inside(getattr(value, name, None))) for name in names if name not in unseen)


def _names_of(value: object) -> list[str]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return sorted({*vars(value)} if hasattr(value, "__dict__") else set(slots))


@functools.cache
def _is_record(kind: type) -> bool:
    """Whether `kind` is a dataclass with a hash of its content."""
    return is_dataclass(kind) and kind.__hash__ is not None and kind.__hash__ is not object.__hash__


def _is_immutable(value: object) -> bool:
    """Whether everything in the record is hashable too, hence immutable."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
