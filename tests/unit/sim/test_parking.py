"""Instances that are parked and woken by hand while requests run: no request is lost, no token is wrong."""

from dataclasses import replace
from functools import partial

import pytest

from ballast.common.ids import WorkerId
from ballast.common.layout import Standing
from services.planner.core import messages as p
from sim.clients import Arrival
from sim.results import Outcome
from sim.world import World
from tests.support.simulated import burst, options


def parking_world(arrivals: list[Arrival]) -> World:
    made = options("recompute", cluster="3xA100-40G", check_every=200)
    return World(replace(made, marks=True), arrivals)


def ask(world: World, number: int, *, away: bool) -> None:
    now_s = world.clock.now_s
    worker_id = WorkerId(f"w{number}")
    event = p.StandingRequested(now_s, "test", f"{worker_id} {away} {now_s}", worker_id, away)
    world.planner.feed(event)


def at(world: World, at_s: float, number: int, *, away: bool) -> None:
    world.clock.at(world.zero_s + at_s, b"operator", partial(ask, world, number, away=away))


def standing(world: World, number: int) -> Standing:
    stored = world.state.stored
    assert stored is not None
    return next(m.standing for g in stored.layout.groups for m in g.members if m.worker_id == f"w{number}")


def go_to(world: World, at_s: float) -> None:
    while world.clock.now_s < world.zero_s + at_s:
        world.clock.step()


def test_an_instance_is_emptied_by_migration_then_parked_then_woken() -> None:
    world = parking_world(burst(base_per_s=1.0, burst_per_s=6.0))
    at(world, 8.0, 1, away=True)
    at(world, 20.0, 1, away=False)
    seen: list[tuple[float, Standing, int, int, float]] = []

    def look() -> None:
        load = world.instances[WorkerId("w1")].load()
        now_s = world.clock.now_s - world.zero_s
        told = (standing(world, 1), load.running_count, load.memory.parameter_bytes, load.wake_s)
        if not seen or seen[-1][1:] != told:
            seen.append((now_s, *told))

    world.clock.every(0.02, b"look", look, first_s=world.zero_s + 1.0)
    run = world.run()
    assert all(record.outcome is Outcome.FINISHED for record in run.records)
    standings = list(dict.fromkeys(told[1] for told in seen))
    assert standings == [Standing.SERVING, Standing.LEAVING, Standing.PARKED, Standing.WAKING]
    assert seen[-1][1] is Standing.SERVING
    parked = next(told for told in seen if told[1] is Standing.PARKED)
    assert parked[0] < 12.0, "answers take longer than that, so they have moved away"
    assert min(told[3] for told in seen) < 1e9, "only parameters outside layers are left"
    assert 1.0 < seen[-1][4] < 1.6, "26 GB from host memory at 24 GB/s"
    assert world.instances[WorkerId("w1")].member.published.migrations.moved
    assert world.instances[WorkerId("w1")].core.totals.prompt_tokens > 0


def test_a_leave_is_undone_at_once() -> None:
    world = parking_world(burst(base_per_s=1.0, burst_per_s=6.0))
    at(world, 6.0, 1, away=True)
    at(world, 6.3, 1, away=False)
    world.clock.at(world.zero_s + 6.2, b"look", lambda: left.append(standing(world, 1)))
    left: list[Standing] = []
    run = world.run()
    assert left == [Standing.LEAVING]
    assert standing(world, 1) is Standing.SERVING
    assert all(record.outcome is Outcome.FINISHED for record in run.records)
    assert not world.instances[WorkerId("w1")].member.parks.parked


def test_the_last_serving_instance_stays() -> None:
    world = parking_world([])
    for number in range(3):
        at(world, 1.0 + number, number, away=True)
    go_to(world, 8.0)
    assert [standing(world, number) for number in range(3)] == [Standing.PARKED, Standing.PARKED, Standing.SERVING]


@pytest.mark.parametrize("crashed", [0, 1])
def test_an_instance_may_crash_while_it_parks_or_wakes(crashed: int) -> None:
    """After a restart the instance serves, whatever it was doing before."""
    world = parking_world(burst())
    at(world, 5.0, crashed, away=True)
    at(world, 5.0 + 8.0 * crashed, crashed, away=False)
    instance = world.instances[WorkerId(f"w{crashed}")]

    def crash() -> None:
        instance.crash()
        world.clock.after(2.0, b"restart", lambda: world._restart(crashed, instance))  # pyright: ignore[reportPrivateUsage]

    world.clock.at(world.zero_s + (5.2, 13.5)[crashed], b"crash", crash)
    run = world.run()
    assert all(record.outcome is Outcome.FINISHED for record in run.records)
    assert standing(world, crashed) is Standing.SERVING
