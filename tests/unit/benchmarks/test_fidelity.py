"""What the comparison of simulated and real runs tells the simulator of the machine."""

from dataclasses import fields, replace

from benchmarks.fidelity import Overheads, slowed
from services.worker.emulation.machine import Measured
from services.worker.policy.cost import CostModel
from tests.unit.worker.emulation.machines import small_machine

_EACH = CostModel(*(float(number) for number in range(1, len(fields(CostModel)) + 1)))


def test_a_slower_machine_takes_longer_for_everything_and_forgets_no_cost() -> None:
    made = small_machine()
    measured = Measured(layer=_EACH, step=_EACH, first=_EACH, last=_EACH)
    made = made.model_copy(update={"execution": measured})
    known = Overheads(step_s=0.0, request_s=0.0)
    assert slowed(made, known).execution == measured
    twice = slowed(made, replace(known, step_slowdown=2.0, prompt_slowdown=2.0)).execution
    assert isinstance(twice, Measured)
    assert twice.layer == _EACH.plus(_EACH)
