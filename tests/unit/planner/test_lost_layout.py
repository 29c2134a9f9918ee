"""A planner that finds no layout rebuilds it from the places that instances report."""

from dataclasses import replace

import pytest

from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member, Place
from services.planner.core import messages as p
from services.planner.core.claims import WorkerClaim, rebuild
from services.planner.core.stages import Stage
from tests.support.planner_core import MODEL, Planner

LAYERS = 4
ALONE = Layout(Epoch(1), LAYERS, (), "start")


def group(*stages: tuple[str, int, int], life: int = 1) -> Group:
    members = tuple(Member(WorkerId(w), Incarnation(life), "", first, last) for w, first, last in stages)
    return Group(GroupId(stages[0][0]), members)


PAIR = group(("w1", 0, 2), ("w2", 2, 4))


def claims(*said: tuple[str, int, Group]) -> dict[WorkerId, WorkerClaim]:
    return {WorkerId(w): WorkerClaim(Incarnation(1), Place(Epoch(epoch), group)) for w, epoch, group in said}


def shape(layout: Layout) -> list[str]:
    return ["+".join(f"{m.worker_id}[{m.first_layer}:{m.last_layer}]" for m in g.members) for g in layout.groups]


def test_a_group_on_which_its_members_agree_is_restored() -> None:
    alone = group(("w3", 0, 4))
    rebuilt = rebuild(ALONE, claims(("w1", 7, PAIR), ("w2", 7, PAIR), ("w3", 9, alone)), LAYERS)
    assert rebuilt is not None
    assert shape(rebuilt.layout) == ["w1[0:2]+w2[2:4]", "w3[0:4]"]
    assert (rebuilt.layout.epoch, rebuilt.partial) == (9, ())


@pytest.mark.parametrize(
    "other",
    [
        {},  # w2 is missing
        claims(("w2", 8, PAIR)),  # w2 reports another epoch
        claims(("w2", 7, group(("w1", 0, 1), ("w2", 1, 4)))),
        {WorkerId("w2"): WorkerClaim(Incarnation(2), Place(Epoch(7), PAIR))},  # another incarnation of w2
    ],
)
def test_members_that_disagree_on_their_group_count_as_partial(other: dict[WorkerId, WorkerClaim]) -> None:
    rebuilt = rebuild(ALONE, {**claims(("w1", 7, PAIR)), **other}, LAYERS)
    assert rebuilt is not None
    assert rebuilt.layout.groups == ()
    assert ("w1", 1) in rebuilt.partial


def test_a_lone_worker_may_be_whole_or_partial() -> None:
    said = claims(("w1", 7, group(("w1", 0, 2))), ("w2", 7, group(("w2", 0, 4))))
    rebuilt = rebuild(ALONE, said, LAYERS)
    assert rebuilt is not None
    assert shape(rebuilt.layout) == ["w2[0:4]"]
    assert rebuilt.partial == (("w1", 1),)


def test_the_stored_layout_counts_unless_places_are_newer() -> None:
    stored = Layout(Epoch(7), LAYERS, (group(("w1", 0, 4)), group(("w2", 0, 4)), group(("w4", 0, 4))), "restore")
    assert rebuild(stored, claims(("w1", 7, PAIR), ("w2", 6, PAIR)), LAYERS) is None
    rebuilt = rebuild(stored, claims(("w1", 8, PAIR), ("w2", 8, PAIR)), LAYERS)
    assert rebuilt is not None
    assert shape(rebuilt.layout) == ["w1[0:2]+w2[2:4]", "w4[0:4]"]


# ---------------------------------------------------------------- in the planner


def up(planner: Planner, worker: str, place: Place | None) -> None:
    planner.lives[worker] = 1
    planner.tell(
        p.InstanceUp(0.0, "c", WorkerId(worker), Incarnation(1), f"{worker}:1", MODEL, False, f"{worker}:2", place)
    )


def begin(planner: Planner) -> None:
    planner.lead()
    planner.tell(p.SnapshotBegan(0.0, "c"))


PLACE = Place(Epoch(57), PAIR)


def test_a_pipeline_outlives_the_loss_of_all_planners_and_of_the_state_server() -> None:
    planner = Planner()
    begin(planner)
    up(planner, "w1", PLACE)
    planner.wait(1.0)
    assert not [c for c in planner.said if isinstance(c, p.WriteLayout)], (
        "it waits until the monitor's snapshot is complete"
    )
    up(planner, "w2", PLACE)
    up(planner, "w3", None)
    planner.tell(p.SnapshotEnded(1.0, "c"))
    planner.wait(1.0)
    assert planner.shape == ["w1[0:2]+w2[2:4]", "w3[0:4]"]
    assert planner.core.layout.epoch == 58, "above every epoch known to its members"
    assert planner.stored is not None
    assert planner.stored.layout == planner.core.layout
    assert planner.core.layout.groups[0].leader.address == "w1:1"
    assert planner.core.partial == ()


def test_a_rediscovered_group_can_be_dissolved_and_old_places_are_ignored() -> None:
    planner = Planner()
    begin(planner)
    for worker in ("w1", "w2"):
        up(planner, worker, PLACE)
    planner.tell(p.SnapshotEnded(0.0, "c"))
    planner.wait(1.0)
    planner.tell(p.WorkerDrainRequested(planner.now_s, "c", "d", WorkerId("w2")))
    planner.go_through("w1", "w2")
    planner.wait(1.0)
    assert planner.journal[-1] is Stage.DONE
    assert planner.shape == ["w1[0:4]", "w2[0:4]"]


def test_a_survivor_without_its_group_gets_the_missing_layers() -> None:
    planner = Planner()
    begin(planner)
    up(planner, "w1", PLACE)
    up(planner, "w3", None)
    planner.tell(p.SnapshotEnded(0.0, "c"))
    planner.wait(1.0)
    planner.go_through("w1")
    planner.wait(1.0)
    assert planner.shape == ["w1[0:4]", "w3[0:4]"]
    assert planner.journal[-1] is Stage.DONE


def test_a_stored_layout_needs_no_reports() -> None:
    before = Planner()
    before.start("w1", "w2")
    planner = Planner()
    stored = before.stored
    assert stored is not None
    planner.stored = p.StoredLayout(replace(stored.layout, epoch=Epoch(57)), MODEL)
    begin(planner)
    up(planner, "w1", PLACE)
    up(planner, "w2", PLACE)
    planner.tell(p.SnapshotEnded(0.0, "c"))
    planner.wait(1.0)
    assert planner.core.layout == planner.stored.layout
