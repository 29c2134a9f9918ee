"""Decides when a worker sends a load report to a dispatcher for which it has no tokens.

A dispatcher that receives tokens gets a report with every step. Reports to others cost a message on both sides, so they
are sent only for changes that affect routing: arrivals and ends of requests, and larger changes of memory. A report is
sent at once when the worker becomes idle, because no later one would follow.
"""

from ballast.common.load import LoadReport

INTERVAL_S = 0.02  # minimum interval per dispatcher; multiplied by their number to bound a worker's message rate
_LONGEST_S = 2.0  # maximum interval between two reports, because dashboards display their totals
_USED_SHARE = 32  # fraction of the blocks; smaller changes do not affect routing


def is_due(
    told: LoadReport | None, report: LoadReport, silent_s: float, stream_count: int, *, counts_more: bool
) -> bool:
    """True if a report is due. `told`: the last report on this stream, sent `silent_s` ago. `counts_more`: the new
    report counts further requests of this stream.
    """
    if told is None or silent_s >= _LONGEST_S:
        return True
    changed = counts_more or _routing(told) != _routing(report)
    used_change = abs(told.used_block_count - report.used_block_count)
    if report.running_count == 0:
        return changed or used_change > 0
    return silent_s >= INTERVAL_S * stream_count and (changed or used_change * _USED_SHARE >= report.block_count)


def _routing(report: LoadReport) -> tuple[int | bool, ...]:
    return (
        report.block_count,
        report.kept_block_count,
        report.waiting_block_count,
        report.running_count,
        report.waiting_count,
        report.max_running_count,
        report.prompt_token_count < report.max_prompt_token_count,
        report.draining,
        report.offline_wanted_tokens > 0,
        report.memory.parameter_bytes,  # changes when an instance is parked or woken, and is displayed on dashboards
    )
