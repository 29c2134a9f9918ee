"""Breadth-first search over all states that pure cores and a small model around them can reach."""

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
    """A state. Actions change it; the search copies it before."""

    def actions(self) -> Iterable[tuple[str, Callable[[Any], None]]]:
        """All that can happen next, by name; each is called with a copy of this world."""
        ...

    def check(self) -> None:
        """Raises AssertionError or InvariantViolation where a promise is broken."""
        ...

    def check_end(self) -> None:
        """Likewise of a state in which nothing can happen any more."""
        ...

    def key(self) -> object:
        """What `frozen` is to tell states apart by."""
        ...


@dataclass(frozen=True)
class Found:
    """What a search has seen."""

    states: int
    ends: int
    whole: bool  # all states have been reached: the limit was not met
    depth: int


class Broken(AssertionError):
    """A promise is broken; its message holds the shortest way there."""


def search(first: Any, limit: int) -> Found:
    """Looks at no more than `limit` states.

    Raises:
        Broken: with the actions that lead there.
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
    """Something to be copied many times. Copies share functions, and records that cannot change."""

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
    """A value that equals another one's where the objects hold the same. References up the tree count as their depth.
    Of instants it is told which have passed by `now_s`; fields named `unseen` are left out.
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
    """A dataclass whose objects have a hash of what they hold."""
    return is_dataclass(kind) and kind.__hash__ is not None and kind.__hash__ is not object.__hash__


def _is_immutable(value: object) -> bool:
    """Nothing that it holds can change, either."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
