from dataclasses import replace

from tests.unit.bench.samples import bursty_run, dropped_run
from tools.bench.plot import settled_capacity
from tools.bench.results import policy_result


def test_samples_during_transitions_are_left_out() -> None:
    """Samples during the drop (26.8 to 28.3 s) and the restore (51.8 to 53.3 s) are left out."""
    run = dropped_run()
    dip = [26.8 <= s.at_s <= 28.3 for s in run.samples]
    run.samples = [replace(s, kv_capacity_bytes=1) if d else s for s, d in zip(run.samples, dip, strict=True)]
    assert any(dip)
    at_s, capacity_bytes = settled_capacity(policy_result(run, "drop"))
    assert set(capacity_bytes) == {256 << 20, 460 << 20}
    assert not [t for t in at_s if 26.8 <= t <= 28.3 or 51.8 <= t <= 53.3]
    assert len(at_s) == len(run.samples) - 8


def test_without_transitions_every_sample_is_drawn() -> None:
    policy = policy_result(bursty_run(), "recompute")
    assert settled_capacity(policy) == (policy.series.at_s, policy.series.kv_capacity_bytes)
