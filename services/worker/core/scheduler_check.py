"""Consistency check of a scheduler, for tests and simulations."""

from ballast.common.errors import InvariantViolation
from services.worker.core.line import OFFLINE_RANK, order
from services.worker.core.scheduler import Scheduler


def check(scheduler: Scheduler, completed_step_id: int) -> None:
    """Raise InvariantViolation unless counts are right, sequences are in order and each has the blocks that it
    needs.
    """
    if scheduler.surplus(completed_step_id) is not None:
        raise InvariantViolation(
            f"{scheduler.reserved_block_count} of {scheduler.block_count} blocks are reserved,"
            f" {scheduler.running_count} of {scheduler.max_running_count} sequences run"
        )
    running, waiting = scheduler.running, scheduler.waiting
    held = [*running, *scheduler.suspended.values(), *scheduler.swap.holders]
    scheduler.swap.check([s for s in running if s.rank == OFFLINE_RANK])
    scheduler.line.check()
    scheduler.suspended.check()
    reserved_count = sum(s.reserved_block_count for s in held) - scheduler.prefixes.shared_count
    if scheduler.reserved_block_count != reserved_count:
        raise InvariantViolation(f"{scheduler.reserved_block_count} blocks are reserved, the sum is {reserved_count}")
    bound = scheduler.limits.max_waiting_count
    bounded = [s.rank == OFFLINE_RANK for s in waiting if not s.may_overfill]
    if max(sum(bounded), len(bounded) - sum(bounded)) > bound:
        raise InvariantViolation(f"{len(waiting)} sequences wait, but only {bound} online and {bound} offline ones may")
    if [order(s) for s in running] != sorted(order(s) for s in running):
        raise InvariantViolation(f"out of order: {[order(s) for s in running]}")
    for sequence in running:
        sequence.check_running(scheduler.block_tokens)
