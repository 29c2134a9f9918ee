"""The simulation's state server answers like the scripts in a real Redis, for any operations in any order."""

import asyncio
import random
from collections import Counter
from typing import Any, cast

import pytest

from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.transition import TransitionKind
from ballast.service.state import StateServer, lease_key
from services.planner.core.messages import WriteJournal, WriteLayout
from services.planner.core.stages import Stage
from services.planner.core.transition import Journal
from services.planner.store import RedisLayoutStore
from sim.state import Contents, Lease
from tests.support.reporting_worker import model_info
from tools.local.state_server import PrivateStateServer

_STEPS = 400
_TTL_S = 600.0
_FAR = 1 << 45  # a token greater than any clock value, so that model and server issue the same token
_MODEL = model_info(4)


def _layout(epoch: int, worker: str) -> Layout:
    member = Member(WorkerId(worker), Incarnation(1), f"{worker}:1", 0, 4)
    return Layout(Epoch(epoch), 4, (Group(GroupId(worker), (member,)),), "test")


class Pair:
    """The model and the real server. Each operation is applied to both, and returns its name and both answers."""

    def __init__(self, state: StateServer, rng: random.Random) -> None:
        self._state = state
        self._store = RedisLayoutStore(state)
        self._model = Contents()
        self._rng = rng
        self._above = _FAR
        self._epochs = (1, 2, 3, 4)

    async def step(self) -> tuple[str, object, object]:
        acts = (self.acquire, self.acquire, self.release, self.run_out, self.write, self.write, self.note, self.note)
        if self._rng.random() < 0.01:
            return await self.flush()
        return await self._rng.choice(acts)()

    async def acquire(self) -> tuple[str, object, object]:
        name, holder = self._rng.choice(("planner", "planner", "monitor")), self._rng.choice(("p1", "p2"))
        self._above += self._rng.choice((0, 1))
        above = self._above if self._rng.random() < 0.7 else self._above - 5
        lease = self._model.leases.get(name)
        if lease is None:  # otherwise the server would derive the token from its clock
            above = self._above = max(self._above, self._model.counters.get(name, 0)) + 1
        there = await self._state.acquire_lease(name, holder, _TTL_S, "host:1", above)
        return f"acquire {name} {holder} above {above}", self._model.acquire(name, holder, _TTL_S, 0.0, above), there

    async def release(self) -> tuple[str, object, object]:
        holder = self._rng.choice(("p1", "p2"))
        await self._state.release_lease("planner", holder)
        self._model.release("planner", holder, 0.0)
        return f"release {holder}", None, None

    async def run_out(self) -> tuple[str, object, object]:
        """Expires the planner's lease with some probability."""
        if self._rng.random() < 0.3:
            await self._state.run(cast(Any, self._state.redis.delete(lease_key("planner"))))
            lease = self._model.leases.get("planner")
            if lease is not None:
                self._model.leases["planner"] = Lease(lease.holder, lease.token, -1.0)
        return "run out", None, None

    async def write(self) -> tuple[str, object, object]:
        command = WriteLayout(
            _layout(self._epoch(), self._rng.choice("ab")),
            _MODEL,
            self._expected(),
            self._token(),
            "test",
            self._rng.choice(((), ((WorkerId("w9"), Incarnation(2)),))),
        )
        return f"{command}", self._model.write(command, 0.0), await self._store.write(command)

    async def note(self) -> tuple[str, object, object]:
        epoch = self._epoch()
        journal = Journal(
            TransitionKind.DROP,
            _layout(max(1, epoch - 1), "a"),
            _layout(epoch, self._rng.choice("ab")),
            self._rng.choice(list(Stage)),
            "why",
        )
        command = WriteJournal(journal, self._expected(), _MODEL, (), self._token(), "test")
        return f"{command}", self._model.write_journal(command, 0.0), await self._store.write_journal(command)

    async def flush(self) -> tuple[str, object, object]:
        await self._state.run(cast(Any, self._state.redis.flushall()))  # pyright: ignore[reportUnknownMemberType]
        self._model = Contents()
        return "flush", None, None

    async def stored(self) -> tuple[object, object]:
        return self._model.load(), await self._store.load()

    def _token(self) -> int:
        lease = self._model.leases.get("planner")
        return lease.token if lease is not None and self._rng.random() < 0.9 else self._above - 9

    def _epoch(self) -> int:
        return self._rng.choice(self._epochs)

    def _expected(self) -> Epoch | None:
        if self._rng.random() < 0.7:
            return self._model.epoch
        return self._rng.choice((None, Epoch(self._epoch())))


@pytest.mark.timeout(120)
def test_the_model_answers_as_the_server_does() -> None:
    async def compare(seed: int) -> Counter[str]:
        answers = Counter[str]()
        async with PrivateStateServer() as server, asyncio.timeout(100):
            state = StateServer(server.url)
            pair = Pair(state, random.Random(seed))
            for number in range(_STEPS):
                what, here, there = await pair.step()
                assert here == there, f"step {number}: {what}"
                answers[getattr(there, "name", "none")] += 1
                here, there = await pair.stored()
                assert here == there, f"step {number}: after {what}"
            await state.close()
        return answers

    answers = asyncio.run(compare(1))
    assert min(answers[outcome] for outcome in ("WRITTEN", "CONFLICT", "FENCED")) > 10, answers


def test_tokens_and_incarnations_grow_after_the_server_lost_its_data() -> None:
    contents = Contents()
    first = contents.acquire("planner", "p1", 3.0, 100.0)
    assert contents.acquire("planner", "p2", 3.0, 101.0) is None
    assert contents.acquire("planner", "p1", 3.0, 102.0) == first
    again = Contents().acquire("planner", "p2", 3.0, 103.0)
    assert first is not None
    assert again is not None
    assert again > first
    assert contents.acquire("planner", "p2", 3.0, 106.0, above=10**9) == 10**9 + 1
