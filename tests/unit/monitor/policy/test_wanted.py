"""The number of instances that an autoscaler may follow."""

from ballast.common.ids import WorkerId
from services.monitor.policy.demand import ClusterDemand
from services.monitor.policy.wanted import Wanted


def sample(
    at_s: float, wanted_bytes: int, *, workers: int = 4, complete: bool = True, each_bytes: int = 100
) -> ClusterDemand:
    """Each instance has 100 bytes of KV with all its parameters, and so many as it is."""
    return ClusterDemand(
        at_s=at_s,
        wanted_bytes=wanted_bytes,
        engaged_bytes=wanted_bytes,
        used_bytes=wanted_bytes,
        capacity_bytes=each_bytes * workers,
        undropped_bytes=100 * workers,
        groups=tuple((WorkerId(f"w{number}"),) for number in range(workers)),
        complete=complete,
    )


def after(*samples: ClusterDemand) -> int:
    wanted = Wanted(0.8)
    for one in samples:
        wanted.observe(one)
    return wanted.instance_count


def test_nothing_is_wanted_before_anything_is_known() -> None:
    assert after() == 0
    assert after(sample(0.0, 500, workers=0)) == 0


def test_steady_demand_wants_the_instances_that_hold_it_with_room_to_spare() -> None:
    assert after(sample(0.0, 0)) == 1
    assert after(sample(0.0, 80)) == 1
    assert after(sample(0.0, 81)) == 2
    assert after(sample(0.0, 400)) == 5


def test_a_short_burst_wants_no_instance_and_a_long_one_does() -> None:
    calm = [sample(float(at), 160) for at in range(60)]
    burst = [sample(60.0 + at, 480) for at in range(4)]
    assert after(*calm) == 2
    assert after(*calm, *burst) == 3
    lasting = [sample(60.0 + at, 480) for at in range(300)]
    assert after(*calm, *lasting) == 6


def test_while_part_of_the_demand_is_unknown_the_number_does_not_fall() -> None:
    assert after(sample(0.0, 400), sample(600.0, 0, complete=False)) == 5
    assert after(sample(0.0, 400), sample(600.0, 0)) == 1


def test_memory_of_dropped_parameters_makes_no_instance_superfluous() -> None:
    """What is wanted is measured by instances with all their parameters, to which the cluster returns."""
    before, dropped = sample(0.0, 400), sample(0.0, 400, each_bytes=300)
    assert after(before) == after(dropped) == 5
