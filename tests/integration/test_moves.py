"""Real dispatchers follow requests between workers that form and dissolve groups; no token is lost or duplicated."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from ballast.common import errors
from tests.support.dispatchers import Answer, Arena, request, until, until_async
from tests.support.timed_group import TimedMember
from tests.support.timed_worker import TimedSettings, publish_groups, scripted_text, scripted_tokens


class GroupArena:
    """Dispatchers, and timed members that can merge into groups."""

    def __init__(self, arena: Arena, members: Sequence[TimedMember]) -> None:
        self.arena = arena
        self.members = members
        self.epoch = 0

    def publish(self, *groups: Sequence[TimedMember]) -> None:
        self.epoch += 1
        publish_groups(self.arena.state.url, self.epoch, [[m.member() for m in group] for group in groups])

    async def adopted(self) -> None:
        """Waits until every dispatcher has adopted the latest layout."""

        async def all_know() -> bool:
            statuses = [await dispatcher.status() for dispatcher in self.arena.dispatchers]
            return all(status.layout.epoch == self.epoch for status in statuses)

        await until_async(all_know, f"epoch {self.epoch}")

    def dispatch(self, count: int, max_tokens: int, logprobs: int | None = None) -> list[asyncio.Task[Answer]]:
        """Sends requests to all dispatchers in turn."""
        dispatchers = self.arena.dispatchers
        return [
            asyncio.create_task(
                dispatchers[i % len(dispatchers)].generate(
                    request([9, i], max_tokens=max_tokens + i, request_id=f"r{i}", logprobs=logprobs)
                )
            )
            for i in range(count)
        ]

    def names(self, member: TimedMember) -> set[str]:
        return {sequence.submit.request_id for sequence in member.running}


@contextlib.asynccontextmanager
async def group_arena(*settings: TimedSettings, dispatchers: int = 1) -> AsyncGenerator[GroupArena]:
    async with contextlib.AsyncExitStack() as stack:
        members = [await stack.enter_async_context(TimedMember(s)) for s in settings]
        arena = await stack.enter_async_context(Arena(dispatchers=dispatchers))
        group = GroupArena(arena, members)
        group.publish(*([member] for member in members))
        await arena.connected(*members)
        yield group


def settings(count: int, **changes: float) -> list[TimedSettings]:
    return [TimedSettings(worker_id=f"w{i}", step_s=changes.get("step_s", 0.005)) for i in range(count)]


def check(answers: Sequence[Answer], max_tokens: int) -> None:
    for index, answer in enumerate(answers):
        expected = scripted_tokens([9, index], 7, max_tokens + index)
        assert answer.error is None
        assert answer.token_ids == expected
        assert answer.text == scripted_text(expected)
        assert answer.last.usage.replay_count == 0


async def test_a_drop_and_a_restore_with_two_dispatchers_lose_and_repeat_nothing() -> None:
    async with group_arena(*settings(2), dispatchers=2) as group:
        leader, other = group.members
        calls = group.dispatch(40, 1000, logprobs=1)  # at least five seconds, so that all run throughout
        await until(lambda: len(other.running) >= 15, "both to be busy")
        group.publish([leader, other])
        other.leads = False
        moved_count = other.hand_over(leader, tell_s=0.02)
        await until(lambda: leader.resumed_count == moved_count, "all to be asked for at the leader")
        before = len(other.submitted)
        late = group.arena.dispatchers[0].generate(request([5], max_tokens=5))
        assert (await late).error is None
        assert len(other.submitted) == before  # a follower gets no new requests

        async def stream_is_gone() -> bool:
            return not other.has_streams

        await until_async(stream_is_gone, "the follower's streams to be closed")
        other.leads = True
        half = set(sorted(group.names(leader))[::2])
        back_count = leader.hand_over(other, half)  # before any dispatcher has a stream to `other`
        await asyncio.sleep(0.05)
        group.publish([leader], [other])
        await until(lambda: other.resumed_count == back_count > 5, "half to be asked for at the other")
        answers = await asyncio.gather(*calls)
        check(answers, 1000)
        assert all(len([lp for r in a.responses for lp in r.logprobs]) == len(a.token_ids) for a in answers)
        statuses = [await dispatcher.status() for dispatcher in group.arena.dispatchers]
        assert sum(status.requests_total["length"] for status in statuses) == 41
        await group.arena.connected(leader, other)


async def test_moved_requests_continue_once_there_is_a_stream_to_their_new_worker() -> None:
    async with group_arena(*settings(2)) as group:
        leader, other = group.members
        group.publish([leader, other])
        await group.adopted()
        calls = group.dispatch(6, 300)
        await until(lambda: len(leader.running) == 6, "all to run")
        leader.hand_over(other)
        await asyncio.sleep(0.1)
        assert other.request_count == 0, "no request may have been submitted there yet"
        group.publish([other], [leader])
        check(await asyncio.gather(*calls), 300)
        assert other.resumed_count == 6


async def test_status_names_every_member_of_a_group() -> None:
    async with group_arena(*settings(3)) as group:
        first, second, third = group.members
        group.publish([second, first], [third])
        await group.adopted()
        status = await group.arena.dispatcher.status()
        shown = {w.worker_id: (w.group_id, w.connected, w.HasField("load")) for w in status.workers}
        assert shown == {
            "w0": ("g-w1-w0", True, False),
            "w1": ("g-w1-w0", True, True),
            "w2": ("g-w2", True, True),
        }


async def test_cancel_and_deadline_during_a_move_between_workers() -> None:
    async with group_arena(*settings(2)) as group:
        leader, other = group.members
        group.publish([leader, other])
        await group.adopted()
        dispatcher = group.arena.dispatcher
        late = asyncio.create_task(dispatcher.generate(request(max_tokens=4000, request_id="late"), timeout_s=10.0))
        call = dispatcher.stub.Generate(request(max_tokens=4000, request_id="cancelled"))
        await call.read()
        await until(lambda: len(leader.running) == 2, "both to run")
        leader.hand_over(other)

        async def is_moving() -> bool:
            return not leader.running and (await dispatcher.status()).running_request_count == 2

        await until_async(is_moving, "both to be under way")
        call.cancel()
        assert isinstance((await late).error, errors.DeadlineExceeded)

        async def both_ended() -> bool:
            status = await dispatcher.status()
            # On a busy machine the client's own deadline may expire a moment earlier and cancel the late request.
            return dict(status.requests_total) in ({"cancelled": 1, "deadline": 1}, {"cancelled": 2})

        await until_async(both_ended, "both to be counted")
        assert (await dispatcher.status()).running_request_count == 0
