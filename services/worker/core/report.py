"""Creates a worker's load report. It counts online work only; blocks and places held by offline work count as free."""

import collections.abc
from typing import NamedTuple

from ballast.common.load import LoadReport, MemoryReport
from services.worker.core.scheduler import Scheduler
from services.worker.core.sequence import Sequence


class GroupTotals(NamedTuple):
    """Counters of one group, or the sums of several, since their creation."""

    preemptions: int = 0
    offline_yields: int = 0
    offline_lost_tokens: int = 0
    prefix_queries: int = 0  # tokens, as in `LoadReport`
    prefix_hits: int = 0
    prefix_host_hits: int = 0

    def plus(self, group: Scheduler) -> "GroupTotals":
        offline, prefixes = group.offline_work, group.prefixes
        return GroupTotals(
            self.preemptions + group.preemptions_total,
            self.offline_yields + offline.yields_total,
            self.offline_lost_tokens + offline.lost_tokens_total,
            self.prefix_queries + prefixes.queried_tokens_total,
            self.prefix_hits + prefixes.hit_tokens_total,
            self.prefix_host_hits + prefixes.host_hit_tokens_total,
        )


class ReportTotals(NamedTuple):
    """Counters since the start of the worker."""

    steps: int
    prompt_tokens: int  # tokens of online prompts
    generation_tokens: int  # tokens of online answers
    offline_tokens: int
    closed: GroupTotals  # counters of groups that have ended


class Parks(NamedTuple):
    """Whether the worker is parked, and how long it takes to wake; see `LoadReport`."""

    parked: bool = False
    wake_s: float = 0.0


IN_SERVICE = Parks()


def _token_count(sequence: Sequence) -> int:
    return sequence.token_count


def load_of(
    groups: collections.abc.Sequence[Scheduler],
    totals: ReportTotals,
    step_age_s: float,
    memory: MemoryReport,
    newest_epoch: int,
    parks: Parks,
    *,
    draining: bool,
) -> LoadReport:
    """Create the worker's load report. `groups`: the groups that it leads, the current one last."""
    waiting_block_count = spare_block_count = running_count = waiting_count = max_running_count = 0
    offline_block_count = offline_running_count = offline_waiting_count = waiting_tokens = 0
    closed = totals.closed
    *leaving, scheduler = groups
    for one in groups:
        offline = one.offline
        waiting_count += one.line.count
        block_count, token_count = one.wanted_by_waiting
        waiting_block_count += block_count
        waiting_tokens = token_count  # after the loop: of the current group, which is the last one
        if one.swap.entries:
            away = one.swap.away
            waiting_count += len(away) + one.swap.leaving_count
            waiting_block_count += sum(one.need(s) for s in away)
            offline_waiting_count += len(one.swap.offline_away)
        running_count += one.running_count - len(offline)
        offline_running_count += len(offline)
        offline_block_count += one.offline_block_count
        offline_waiting_count += one.line.offline_count
        closed = closed.plus(one)
    for one in leaving:
        max_running_count += one.running_count
        spare_block_count += max(0, one.free_block_count)
    # Blocks of a group that is still draining count as used, since this group gets them later.
    block_count = scheduler.block_count if scheduler.stage_count > 1 else scheduler.ceiling_block_count
    used_block_count = block_count - scheduler.free_block_count - scheduler.offline_block_count
    longest = max([s for one in groups for s in one.online], key=_token_count, default=None)
    if parks.parked:
        block_count = used_block_count = 0
    return LoadReport(
        block_tokens=scheduler.block_tokens,
        block_count=block_count,
        used_block_count=used_block_count,
        waiting_block_count=waiting_block_count,
        running_count=running_count,
        waiting_count=waiting_count,
        longest_token_count=0 if longest is None else longest.token_count,
        longest_limit_tokens=0 if longest is None else longest.limit_tokens,
        max_running_count=max_running_count + scheduler.place_count,
        steps_total=totals.steps,
        preemptions_total=closed.preemptions,
        prompt_tokens_total=totals.prompt_tokens,
        generation_tokens_total=totals.generation_tokens,
        step_age_s=step_age_s,
        draining=draining,
        memory=memory,
        newest_epoch=newest_epoch,
        kept_block_count=scheduler.kept_block_count,
        prompt_token_count=scheduler.prompt_tokens + waiting_tokens,
        max_prompt_token_count=scheduler.max_prompt_tokens,
        spare_block_count=spare_block_count,
        offline_block_count=offline_block_count,
        offline_running_count=offline_running_count,
        offline_waiting_count=offline_waiting_count,
        offline_wanted_tokens=0 if draining or parks.parked else scheduler.offline_wanted_tokens,
        offline_tokens_total=totals.offline_tokens,
        offline_yields_total=closed.offline_yields,
        offline_lost_tokens_total=closed.offline_lost_tokens,
        uncomputed_token_count=sum(one.uncomputed_tokens for one in groups) + waiting_tokens,
        prefixes_kept_s=max(0.0, scheduler.prefixes.at_s - scheduler.prefixes.kept_since_s),
        retained_block_count=scheduler.prefixes.retained_count,
        prefix_queries_total=closed.prefix_queries,
        prefix_hits_total=closed.prefix_hits,
        prefix_host_hits_total=closed.prefix_host_hits,
        host_block_count=len(scheduler.swap.prefixes),
        busiest_caller_count=scheduler.busiest_caller_count,
        parked=parks.parked,
        wake_s=parks.wake_s,
    )
