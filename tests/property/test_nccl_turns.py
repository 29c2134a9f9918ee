"""Posts any operations on both lanes and sides, in any order, while a communicator may fail in any way. Both sides must
then post the same operations to NCCL, only data that was sent may be delivered, every wait must end, and an activation
waits for at most one chunk.
"""

import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Thread

import pytest
import torch

from services.worker.links.channels.nccl import NcclMover
from services.worker.links.channels.turns import ChannelTurns, Lane, Posted
from services.worker.links.ports import ChannelBroken
from tests.support.fake_nccl import GARBAGE, Fate, HostStream, Wires, fates

HISTORIES = 1000
_BULK_BYTES = 64  # larger than any activation


@dataclass
class Sent:
    lane: Lane
    source: torch.Tensor
    target: torch.Tensor
    sending: Posted | None = None
    receiving: Posted | None = None

    def ends(self) -> list[Posted]:
        return [end for end in (self.sending, self.receiving) if end is not None]


class Pair:
    def __init__(self, wires: Wires) -> None:
        self.wires = wires
        ends = socket.socketpair()
        self.sides = [
            ChannelTurns(ends[rank], NcclMover(wires.groups[rank], HostStream(), rank), rank, f"{rank}")
            for rank in (0, 1)
        ]

    def close(self) -> None:
        for side in self.sides:
            side.abort()
            assert not side._moves, "an abort returned while transfers may still access memory"
        for side in (*self.sides, *self.sides):
            side.destroy()

    def send(self, rank: int, lane: Lane, payload: torch.Tensor) -> Sent:
        sent = Sent(lane, payload, torch.zeros_like(payload))
        sent.sending = self.sides[rank].send(lane, sent.source)
        sent.receiving = self.sides[1 - rank].receive(lane, sent.target)
        return sent


def is_delivered(posted: Posted, within_s: float = 20.0) -> bool:
    try:
        posted.wait(within_s)
    except ChannelBroken:
        return False
    return True


@pytest.mark.parametrize("part", range(4))
def test_only_sent_data_is_delivered_however_a_communicator_fails(part: int) -> None:
    ended = {True: 0, False: 0}
    for seed in range(part * HISTORIES // 4, (part + 1) * HISTORIES // 4):
        chance = random.Random(seed)
        for is_right in _history(chance):
            ended[is_right] += 1
    assert ended[True] > HISTORIES
    assert ended[False] > HISTORIES // 4


def _history(chance: random.Random) -> list[bool]:
    """Posts a random history. Returns, for each posted operation, whether it succeeded."""
    count = chance.randint(1, 8)
    drawn = fates(chance, count)
    pair = Pair(Wires(drawn, late_s=0.0005))
    steps, all_sent = _steps(pair, chance, count)
    dies = chance.random() < 0.3
    patience_s = 0.02 if dies or Fate.NEVER_ENDS in drawn else 20.0  # only an abort ends a wait for a dead peer
    broken = False
    for step in steps:
        try:
            step()
        except ChannelBroken:
            broken = True
            break
        if dies and chance.random() < 0.1:
            pair.sides[chance.randrange(2)].abort()  # as links do if a peer has died
    if broken or dies or pair.wires.groups[0].is_aborted:
        pair.sides[0].abort()
    outcomes = list[bool]()
    for sent in all_sent:
        for posted in sent.ends():
            outcomes.append(_end(pair, posted, patience_s))
        if sent.receiving is not None and outcomes[-1]:
            assert torch.equal(sent.target, sent.source), "corrupted data was delivered"
    pair.close()
    assert not pair.wires.mismatched, "the two sides posted different operations"
    return outcomes


def _end(pair: Pair, posted: Posted, patience_s: float) -> bool:
    """Waits for `posted` as a link does: a timeout breaks the link on both sides."""
    try:
        posted.wait(patience_s)
        return True
    except ChannelBroken:
        for side in pair.sides:
            side.abort()
    return is_delivered(posted, 0.0)


def _steps(pair: Pair, chance: random.Random, count: int) -> tuple[list[Callable[[], None]], list[Sent]]:
    """Posts in random order, except that both ends post a lane's payloads in one direction in the same order."""
    queues: dict[tuple[Lane, int, bool], list[Callable[[], None]]] = {}
    all_sent = list[Sent]()
    for number in range(count):
        lane, rank = chance.choice(list(Lane)), chance.randrange(2)
        size = chance.randint(1, 8) if lane is Lane.URGENT else chance.randint(_BULK_BYTES, 2 * _BULK_BYTES)
        sent = Sent(lane, torch.full((size,), number + 1, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8))
        all_sent.append(sent)
        queues.setdefault((lane, rank, True), []).append(partial(_send, pair.sides[rank], sent))
        queues.setdefault((lane, rank, False), []).append(partial(_receive, pair.sides[1 - rank], sent))
    steps = list[Callable[[], None]]()
    while queues:
        key = chance.choice(sorted(queues))
        steps.append(queues[key].pop(0))
        if not queues[key]:
            del queues[key]
    return steps, all_sent


def _send(side: ChannelTurns, sent: Sent) -> None:
    sent.sending = side.send(sent.lane, sent.source)


def _receive(side: ChannelTurns, sent: Sent) -> None:
    sent.receiving = side.receive(sent.lane, sent.target)


@pytest.mark.parametrize("seed", range(40))
def test_an_activation_waits_for_one_turn_at_most(seed: int) -> None:
    """Bulk data is sent both ways all the time; activations are posted at random times, from either side."""
    chance = random.Random(seed)
    pair = Pair(Wires([Fate.LATE] * 200, late_s=0.0003))
    bulk = torch.ones(_BULK_BYTES, dtype=torch.uint8)
    waiting = [pair.send(rank, Lane.BULK, bulk) for _ in range(30) for rank in (0, 1)]
    for number in range(1, 6):
        time.sleep(chance.random() * 0.003)
        rank = chance.randrange(2)
        activation = torch.full((number,), number, dtype=torch.uint8)
        with pair.wires.changed:
            sent = pair.send(rank, Lane.URGENT, activation)
            begun = len(pair.wires.turns)  # the last one may be in progress
        assert all(is_delivered(end) for end in sent.ends())
        assert torch.equal(sent.target, activation)
        with pair.wires.changed:
            later = pair.wires.turns[begun:]
        before = [
            turn for turn in later[: next(i for i, t in enumerate(later) if number in t)] if max(turn) >= _BULK_BYTES
        ]
        assert len(before) <= 1, f"{before} of {later} preceded the activation"
    assert all(is_delivered(end) for sent in waiting for end in sent.ends())
    pair.close()


def test_two_sides_that_both_send_first_do_not_deadlock() -> None:
    pair = Pair(Wires())
    payload = torch.arange(100, dtype=torch.uint8)
    out = [side.send(Lane.BULK, payload) for side in pair.sides]
    targets = [torch.zeros_like(payload) for _ in pair.sides]
    into = [side.receive(Lane.BULK, target) for side, target in zip(pair.sides, targets, strict=True)]
    assert all(is_delivered(posted) for posted in (*out, *into))
    assert sum(sum(turn) for turn in pair.wires.turns) == 200
    pair.close()


def test_operations_posted_during_a_turn_share_the_next_one() -> None:
    """A turn costs a message, two launches and a wait, however large it is."""
    pair = Pair(Wires())
    with pair.wires.changed:  # no turn can end
        sent = [pair.send(0, Lane.BULK, torch.full((9,), number, dtype=torch.uint8)) for number in range(8)]
    assert all(is_delivered(end) for each in sent for end in each.ends())
    assert all(torch.equal(each.target, each.source) for each in sent)
    assert len(pair.wires.turns) <= 3
    pair.close()


def test_failed_data_is_not_delivered_although_its_work_counts_as_completed() -> None:
    pair = Pair(Wires([Fate.FAILS]))
    sent = pair.send(0, Lane.BULK, torch.ones(9, dtype=torch.uint8))
    for end in sent.ends():
        with pytest.raises(ChannelBroken, match=r"remote process exited|ended the connection"):
            end.wait(20.0)
    assert bool((sent.target == GARBAGE).all())
    pair.close()


def test_an_abort_ends_every_wait_and_interrupted_data_is_not_delivered() -> None:
    pair = Pair(Wires([Fate.NEVER_ENDS]))
    posted = [end for lane in Lane for rank in (0, 1) for end in pair.send(rank, lane, torch.ones(9)).ends()]
    outcomes = list[bool]()

    def note(end: Posted) -> None:
        outcomes.append(is_delivered(end))

    waiting = [Thread(target=note, args=(end,)) for end in posted]
    for thread in waiting:
        thread.start()
    deadline_s = time.monotonic() + 20
    while not pair.wires.turns and time.monotonic() < deadline_s:
        time.sleep(0.001)
    for side in pair.sides:
        side.abort()
    for thread in waiting:
        thread.join(20)
    assert outcomes == [False] * len(posted)
    with pytest.raises(ChannelBroken, match="aborted"):
        pair.sides[0].send(Lane.URGENT, torch.ones(1))
    pair.close()
