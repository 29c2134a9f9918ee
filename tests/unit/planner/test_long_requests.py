"""How the planner handles a request that is too long for one instance."""

from dataclasses import replace

from ballast.common.ids import WorkerId
from ballast.common.overload import OverloadPolicy
from ballast.common.traffic import LongDemand, Traffic
from services.planner.core.change_requests import Planning
from services.planner.core.messages import LongRequestRaised, NothingDone, ReliefRaised
from services.planner.core.stages import Stage
from tests.support.planner_core import LOAD, Planner

# An instance holds 32 blocks of 16 tokens; a pair 96.
ROOM = 32 * LOAD.block_tokens
CALM = Traffic(recent_count=2, minute_count=10, minute_tokens=80, ended_count=50, ended_tokens=500, known_s=300.0)


def started(*workers: str, policy: OverloadPolicy = OverloadPolicy.DROP) -> Planner:
    planner = Planner(policy=policy, planning=Planning())
    planner.traffic = CALM
    planner.start(*workers)
    return planner


def say(planner: Planner, tokens: int, where: str = "") -> None:
    planner.tell(LongRequestRaised(planner.now_s, "long", tokens, 0 if where else tokens, WorkerId(where)))


def test_a_long_request_gets_a_group() -> None:
    planner = started("w0", "w1", "w2")
    say(planner, ROOM + 100)
    assert planner.journal == [Stage.PREPARING]
    planner.go_through("w0", "w1")
    assert planner.shape == ["w0[0:2]+w1[2:4]", "w2[0:4]"]
    planner.load = replace(LOAD, block_count=96)
    planner.told(NothingDone)
    say(planner, ROOM + 100)
    (nothing,) = planner.told(NothingDone)
    assert isinstance(nothing, NothingDone)
    assert "w0 can already hold" in nothing.why


def test_nothing_is_dropped_for_a_long_request_under_another_policy() -> None:
    planner = started("w0", "w1", policy=OverloadPolicy.RECOMPUTE)
    say(planner, ROOM + 100)
    assert planner.journal == []


def test_the_instance_that_a_request_outgrows_joins_its_group() -> None:
    planner = started("w0", "w1", "w2")
    say(planner, ROOM + 100, "w2")
    assert planner.journal == [Stage.PREPARING]
    planner.go_through("w0", "w2")
    assert {one for one in planner.shape if "w2" in one} == {one for one in planner.shape if "+" in one}


def test_no_group_is_formed_if_its_prompt_would_delay_other_requests() -> None:
    planner = started("w0", "w1")
    # A batch of prompts takes five seconds, too long for the other requests.
    planner.pace = replace(planner.pace, cost=replace(planner.pace.cost, token_s=0.01))
    planner.load = replace(LOAD, running_count=4)
    say(planner, ROOM + 300)
    assert planner.journal == []
    (nothing,) = planner.told(NothingDone)
    assert isinstance(nothing, NothingDone)
    assert "would cost the others too much" in nothing.why


def test_nothing_is_restored_while_a_long_request_waits() -> None:
    planner = started("w0", "w1")
    say(planner, ROOM + 100)
    planner.go_through("w0", "w1")
    planner.traffic = replace(CALM, long=LongDemand(count=1, need_tokens=700))
    planner.load = replace(LOAD, block_count=96, used_block_count=0)
    planner.wait(60.0)
    planner.told(NothingDone)
    planner.tell(ReliefRaised(planner.now_s, "r"))
    (nothing,) = planner.told(NothingDone)
    assert isinstance(nothing, NothingDone)
    assert "700 tokens wait" in nothing.why


def test_a_group_is_not_restored_while_no_member_can_hold_its_request() -> None:
    planner = started("w0", "w1")
    planner.drop("w0", "w1")
    planner.go_through("w0", "w1")
    planner.load = replace(LOAD, block_count=96, used_block_count=33, longest_token_count=ROOM + 1)
    planner.wait(60.0)
    planner.told(NothingDone)
    planner.tell(ReliefRaised(planner.now_s, "r"))
    (nothing,) = planner.told(NothingDone)
    assert isinstance(nothing, NothingDone)
    assert "a member alone holds" in nothing.why
