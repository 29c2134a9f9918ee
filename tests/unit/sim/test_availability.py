"""A simulated cluster keeps its availability promises at every instant, and the check detects reintroduced faults."""

from collections.abc import Callable

import pytest

from ballast.common.errors import InvariantViolation
from services.planner.core.evictions import Suspects
from sim.dispatcher import DispatcherNode
from sim.world import World
from tests.support.cluster_availability import Availability
from tests.support.mutants import MUTANTS
from tests.support.simulated import options


def watched(act: Callable[[World], None], *, seconds: float = 20.0) -> World:
    """Run a cluster of three without requests; call `act` once it has settled, then watch it for `seconds` more."""
    world = World(options("drop", cluster="3xA100-40G"), [])
    availability = Availability(world)
    world.clock.every(0.05, b"look", availability.look)
    world.clock.at(world.zero_s + 6.0, b"act", lambda: act(world))
    while world.clock.now_s < world.zero_s + 6.0 + seconds:
        world.clock.step()
    return world


def cut(world: World, *, planners: bool) -> None:
    """Cut all workers off from the monitors permanently, and from the planners if `planners` is set."""
    for worker in world.instances:
        for node in (*world.monitors, *(world.planners if planners else ())):
            world.lines.cut(worker, node)


def end_streams(world: World) -> None:
    for instance in world.instances.values():
        instance._lose_streams("a member of its group is gone")  # pyright: ignore[reportPrivateUsage]


ACTS: dict[str, Callable[[World], None]] = {
    "silence-is-death": lambda world: cut(world, planners=False),
    "minority-rule-gone": lambda world: cut(world, planners=True),
    "stream-not-made-anew": end_streams,
}


@pytest.mark.parametrize("mutant", ACTS)
def test_healthy_workers_continue_to_serve(mutant: str) -> None:
    world = watched(ACTS[mutant])
    stored = world.state.stored
    assert stored is not None
    assert [len(group.members) for group in stored.layout.groups] == [1, 1, 1]
    assert all(len(node.core.fleet.usable) == 3 for node in world.dispatchers)


@pytest.mark.parametrize("mutant", ACTS)
def test_a_reintroduced_bug_is_detected(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((Suspects, "gone"), (DispatcherNode, "_connect_again")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # so that the patches are undone
    for patch in MUTANTS[mutant]:
        patch()
    with pytest.raises(InvariantViolation, match=r"is well and not in epoch|has had no stream to"):
        watched(ACTS[mutant])
