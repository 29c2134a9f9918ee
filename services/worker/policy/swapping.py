"""Computes how many KV blocks a step copies between device and host so that the copies overlap with its computation.

This is InferCept's budget: the blocks that the link transfers during the step. The times of steps and copies are
measured, because they depend on the machine and its load.
"""

from ballast.common.record import record

FIRST_BLOCKS = 8  # budget until times have been measured
_KEPT = 0.8  # weight of the previous mean


@record()
class CopyPace:
    """Moving means of measured times (seconds). None: not measured yet."""

    step_s: float | None = None
    block_s: float | None = None  # time to copy one block in all layers

    def after(self, step_s: float, copied_blocks: int, copy_s: float) -> "CopyPace":
        block_s = self.block_s
        if copied_blocks and copy_s > 0:
            block_s = _mean(block_s, copy_s / copied_blocks)
        return CopyPace(_mean(self.step_s, step_s), block_s)


def _mean(before: float | None, value: float) -> float:
    return value if before is None else _KEPT * before + (1 - _KEPT) * value


def copy_budget(pace: CopyPace, fixed_blocks: int) -> int:
    """Return the number of blocks that one step may copy: at least one, so that copies always progress. `fixed_blocks`:
    the configured number; 0: derive it from the measured times.
    """
    if fixed_blocks:
        return fixed_blocks
    if pace.step_s is None or pace.block_s is None:
        return FIRST_BLOCKS
    return max(1, int(pace.step_s / pace.block_s))


def bringing_s(pace: CopyPace, block_count: int) -> float:
    """Return the predicted duration of copying `block_count` blocks from the host; 0.0 if unknown."""
    return 0.0 if pace.block_s is None else block_count * pace.block_s
