"""The planner's gauges of the layout."""

from dataclasses import replace

from prometheus_client import generate_latest

from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member, Standing
from ballast.service.metrics import REGISTRY
from services.planner.metrics import PlannerMetrics


def test_instances_that_do_not_serve_are_no_serving_groups() -> None:
    def group(number: int, standing: Standing) -> Group:
        member = Member(WorkerId(f"w{number}"), Incarnation(1), "", 0, 4)
        return Group(GroupId(f"g{number}"), (replace(member, standing=standing),))

    groups = tuple(group(number, standing) for number, standing in enumerate(Standing))
    PlannerMetrics().layout(Layout(Epoch(1), 4, groups, "test"))
    assert b"ballast_layout_groups 2.0" in generate_latest(REGISTRY), "the serving and the leaving one"
