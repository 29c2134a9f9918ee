"""Rules and samples of memory pressure for tests."""

from ballast.common.ids import WorkerId
from services.monitor.policy.demand import ClusterDemand
from services.monitor.policy.pressure import PressureRules

RULES = PressureRules(
    overload_threshold_fraction=0.95,
    arming_below_fraction=0.1,
    overload_margin_fraction=0.1,
    relief_threshold_fraction=0.5,
    dwell_s=3.0,
    sample_count=12,
)

W0, W1, W2 = (WorkerId(name) for name in ("w0", "w1", "w2"))
ALONE = ((W0,), (W1,))
MERGED = ((W0, W1),)


def sample(
    at_s: float,
    wanted_bytes: int,
    *,
    engaged_bytes: int | None = None,
    used_bytes: int | None = None,
    capacity_bytes: int = 1000,
    undropped_bytes: int = 1000,
    groups: tuple[tuple[WorkerId, ...], ...] = ALONE,
    complete: bool = True,
) -> ClusterDemand:
    """A demand sample. By default, `engaged_bytes` equals `wanted_bytes`, and `used_bytes` is the part of it that
    fits.
    """
    return ClusterDemand(
        at_s=at_s,
        wanted_bytes=wanted_bytes,
        engaged_bytes=wanted_bytes if engaged_bytes is None else engaged_bytes,
        used_bytes=min(wanted_bytes, capacity_bytes) if used_bytes is None else used_bytes,
        capacity_bytes=capacity_bytes,
        undropped_bytes=undropped_bytes,
        groups=groups,
        complete=complete,
    )
