"""`ballast park --wait` and `ballast wake --wait` wait for a layout, and report if it cannot be reached."""

import argparse
import asyncio
from dataclasses import replace
from unittest.mock import Mock

import pytest

from ballast.common.errors import NotPossible
from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member, Standing
from ballast.rpc.codec import LAYOUT
from ballastpb.planner.v1 import planner_pb2 as pb
from tools.cli import park

W1 = Member(WorkerId("w1"), Incarnation(1), "w1:1", 0, 4, data_address="w1:2")
UNREAD = Layout(Epoch(0), 0, (), "nothing planned yet")


def seen(standing: Standing) -> Layout:
    return Layout(Epoch(7), 4, (Group(GroupId("w1"), (replace(W1, standing=standing),)),), "")


def wait_for(wanted: Standing, *layouts: Layout) -> Standing:
    answers = list(layouts)

    async def get(*_: object, **__: object) -> pb.GetLayoutResponse:
        return pb.GetLayoutResponse(layout=LAYOUT.message(answers.pop(0)))

    async def story() -> Standing:
        async with asyncio.timeout(5.0):
            return await park._standing(Mock(GetLayout=get), argparse.Namespace(worker="w1", wait=True), wanted)

    return asyncio.run(story())


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(park, "_POLL_S", 0.0)


def test_a_new_leader_that_has_not_read_the_layout_shows_nothing() -> None:
    leaving, parked = seen(Standing.LEAVING), seen(Standing.PARKED)
    assert wait_for(Standing.PARKED, leaving, UNREAD, leaving, parked) is Standing.PARKED
    assert wait_for(Standing.SERVING, UNREAD, seen(Standing.SERVING)) is Standing.SERVING
    assert wait_for(Standing.PARKED, leaving, replace(UNREAD, epoch=Epoch(8))) is Standing.PARKED, (
        "its process has ended"
    )


@pytest.mark.parametrize("again", [Standing.LEAVING, Standing.PARKED])
def test_a_worker_that_is_parked_again_is_not_waited_for(again: Standing) -> None:
    with pytest.raises(NotPossible, match=f"w1 is {again} again"):
        wait_for(Standing.SERVING, seen(Standing.WAKING), seen(again), seen(again))
    with pytest.raises(NotPossible, match="serves again"):
        wait_for(Standing.PARKED, seen(Standing.LEAVING), seen(Standing.SERVING))
