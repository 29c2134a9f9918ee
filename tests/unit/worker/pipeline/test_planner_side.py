"""Requests that a worker accepts from a planner, and those that it refuses."""

from dataclasses import replace

import pytest

from ballast.common.errors import StaleEpoch
from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.transition import TransitionKind
from services.worker.core.plan import Plan
from sim.world import World
from tests.support.simulated import options

ME = WorkerId("w0")


def whole_again(layer_count: int, incarnation: int) -> Plan:
    """The plan after the loss of a group: this worker, which is in no group, is to serve alone with all layers."""
    member = Member(ME, Incarnation(incarnation), "w0:1", 0, layer_count)
    empty = Layout(Epoch(4), layer_count, (), "lost")
    return Plan(
        TransitionKind.RESTORE, empty, replace(empty, epoch=Epoch(5), groups=(Group(GroupId("w0"), (member,)),))
    )


def test_a_plan_for_an_earlier_incarnation_is_refused() -> None:
    """If it accepted the plan, the new process would report the old one's group, and monitors would refuse its reports
    forever.
    """
    world = World(options(), [])
    worker_id, instance = next(iter(world.instances.items()))
    assert (worker_id, instance.incarnation) == (ME, 1)
    layer_count = instance.member.role.layer_count
    with pytest.raises(StaleEpoch, match="worker incarnation: message carries 7, current is 1"):
        instance.transitions.take(whole_again(layer_count, 7), ())
    assert instance.transitions.said(Epoch(5))[2] is None
    instance.transitions.take(whole_again(layer_count, 1), ())
    assert instance.transitions.said(Epoch(5))[2] is not None
    instance.check()
