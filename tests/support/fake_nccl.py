"""Two process groups that imitate NCCL, including its pitfalls.

Operations that both sides post in the same turn are carried out if each side sends what the other receives; otherwise
both sides wait forever. A failed or aborted work counts as completed, and leaves garbage in the receiver's memory.
Waiting for an aborted work returns as if the work had succeeded. A wait for a dead peer lasts until the abort.
"""

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from threading import Condition
from typing import cast

import torch
from torch.distributed import Work

from tests.support.untouchable import touchable

GARBAGE = 0xEE


class Fate(Enum):
    FINE = "fine"
    LATE = "late"
    FAILS = "fails"
    NEVER_ENDS = "never ends"


@dataclass
class Asked:
    """The operations that one side posts in a turn."""

    out: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    into: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    fate: Fate = Fate.FINE
    ended: bool = False
    error: str = ""


class FakeWork:
    def __init__(self, wires: "Wires", asked: Asked) -> None:
        self._wires = wires
        self._asked = asked

    def is_completed(self) -> bool:
        with self._wires.changed:
            return self._asked.ended

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._wires.changed:
            self._wires.changed.wait_for(lambda: self._asked.ended, 30.0)
            assert self._asked.ended, "the work never ends, and was not aborted"
            if self._asked.error:
                raise RuntimeError(self._asked.error)
        return True


class Wires:
    """Connects the two groups of a pair. `fates`: the outcomes of the first turns; all later turns succeed."""

    def __init__(self, fates: Sequence[Fate] = (), late_s: float = 0.002) -> None:
        self.changed = Condition()
        self.turns: list[tuple[int, ...]] = []  # begun turns: bytes in each direction
        self.mismatched = False
        self._fates = list(fates)
        self._late_s = late_s
        self._asked: tuple[list[Asked], list[Asked]] = ([], [])
        self.groups = FakeGroup(self, 0), FakeGroup(self, 1)

    def ask(self, rank: int, asked: Asked) -> None:
        with self.changed:
            mine, theirs = self._asked[rank], self._asked[1 - rank]
            mine.append(asked)
            number = len(mine) - 1
            if number >= len(theirs):
                return
            other = theirs[number]
            sizes = [[t.numel() for t in part] for part in (asked.out, asked.into, other.into, other.out)]
            self.mismatched |= sizes[:2] != sizes[2:]
            self.turns.append(tuple(sum(size) for size in sizes[:2]))
            fate = self._fates.pop(0) if self._fates else Fate.FINE
            if any(self.groups[end].is_aborted for end in (0, 1)):
                fate = Fate.NEVER_ENDS
            if fate is Fate.LATE:
                self.changed.wait(self._late_s)
            match fate:
                case Fate.FINE | Fate.LATE:
                    self._move(asked, other)
                case Fate.FAILS:
                    for side in (asked, other):
                        self._spoil(side)
                        side.error, side.ended = "NCCL error: remote process exited", True
                case Fate.NEVER_ENDS:
                    pass
            self.changed.notify_all()

    def _move(self, one: Asked, other: Asked) -> None:
        if one.ended or other.ended:
            return
        for source, target in ((one.out, other.into), (other.out, one.into)):
            for a, b in zip(source, target, strict=True):
                touchable(b).copy_(touchable(a))
        one.ended = other.ended = True

    def _spoil(self, asked: Asked) -> None:
        for tensor in asked.into:
            touchable(tensor).fill_(GARBAGE)

    def abort(self, rank: int) -> None:
        with self.changed:
            self.groups[rank].is_aborted = True
            for asked in self._asked[rank]:
                if not asked.ended:
                    self._spoil(asked)
                    asked.ended = True
            self.changed.notify_all()


class FakeGroup:
    """Stands in for `channels.nccl.NcclGroup`."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self._wires = wires
        self._rank = rank
        self._asks: Asked | None = None
        self.connected_to: list[torch.device] = []
        self.is_aborted = False

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected_to.append(device)

    def _start_coalescing(self) -> None:
        self._asks = Asked()

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int) -> Work:
        assert self._asks is not None, "outside of a turn NCCL would use a separate communicator"
        self._asks.out.extend(tensors)
        return cast(Work, None)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int) -> Work:
        assert self._asks is not None, "outside of a turn NCCL would use a separate communicator"
        self._asks.into.extend(tensors)
        return cast(Work, None)

    def _end_coalescing(self) -> Work:
        asked, self._asks = self._asks, None
        assert asked is not None
        with self._wires.changed:
            if self.is_aborted:
                raise RuntimeError("NCCL communicator was aborted")
        self._wires.ask(self._rank, asked)
        return cast(Work, FakeWork(self._wires, asked))

    def abort(self) -> None:
        self._wires.abort(self._rank)

    def shutdown(self) -> None:
        assert self.is_aborted


class HostStream:
    """Stands in for `channels.nccl.NcclStream`; host work is complete when its wait returns."""

    def __init__(self, device: torch.device | None = None) -> None:
        pass

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self, work: Work) -> None:
        """Does nothing, since waiting for the work suffices."""


def fates(chance: random.Random, count: int) -> list[Fate]:
    """Random outcomes, mostly successes; in half of all cases one turn fails or never ends."""
    drawn = [chance.choices((Fate.FINE, Fate.LATE), (6, 1))[0] for _ in range(count)]
    if chance.random() < 0.5:
        drawn[chance.randrange(count)] = chance.choice((Fate.FAILS, Fate.NEVER_ENDS))
    return drawn
