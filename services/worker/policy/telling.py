"""When a dispatcher for which a worker has no tokens hears how loaded the worker is.

Whoever has tokens here gets a report with every step. The others cost a message each, on both sides, so they hear only
of what routing would see: requests that come and go, and memory that has changed by more than a little. At once when
nothing runs any more, since nothing would follow.
"""

from ballast.common.load import LoadReport

INTERVAL_S = 0.02  # times the dispatchers: the messages of a worker do not grow with their number
_LONGEST_S = 2.0  # totals are shown to people
_USED_SHARE = 32  # of the blocks: less more or less in use changes no choice


def is_due(
    told: LoadReport | None, report: LoadReport, silent_s: float, stream_count: int, *, counts_more: bool
) -> bool:
    """`told`: in the last message over this stream, `silent_s` ago. `counts_more`: than it has told, of the requests
    that came over this stream.
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
        report.memory.parameter_bytes,  # of one that is parked or woken, for people
    )
