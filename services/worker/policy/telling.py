"""When a worker sends its load to a dispatcher for which it has no tokens.

A dispatcher with tokens here gets a report with every step. Others cost a message each, on both sides, so they get only
what routing uses: arrivals and ends of requests, and larger changes of memory. At once when the worker becomes idle, as
no later report would follow.
"""

from ballast.common.load import LoadReport

INTERVAL_S = 0.02  # times the dispatchers: a worker's message rate does not grow with their number
_LONGEST_S = 2.0  # totals are shown to people
_USED_SHARE = 32  # fraction of the blocks: a smaller change does not alter routing


def is_due(
    told: LoadReport | None, report: LoadReport, silent_s: float, stream_count: int, *, counts_more: bool
) -> bool:
    """`told`: the last report on this stream, sent `silent_s` ago. `counts_more`: requests of this stream that it did
    not count.
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
        report.memory.parameter_bytes,  # of a parked or woken instance, shown to people
    )
