"""The load report of an instance: input of routing, predictions and `ballast status`."""

from dataclasses import dataclass

from ballast.common.errors import InvariantViolation
from ballast.common.record import record

HASTY_REPORT_S = 0.01  # minimum interval between reports when demand jumps
_JUMP_SHARE = 16  # demand has jumped when it has grown by at least 1/16 of all blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Device memory in bytes. Parameters + KV + free = budget, always (I3)."""

    budget_bytes: int
    parameter_bytes: int
    kv_bytes: int
    free_bytes: int
    extent_bytes: int = 0  # granularity of memory; 0: not reported

    def check(self) -> None:
        if self.parameter_bytes + self.kv_bytes + self.free_bytes != self.budget_bytes:
            raise InvariantViolation(f"device memory does not add up: {self}")


@record(kw_only=True)
class LoadReport:
    """State of an instance after a step. Block counts are the minimum over the stages of its group.

    Counts of requests, their blocks and their tokens are those of online work: memory held by offline work counts as
    free. Offline work has its own fields; totals and `memory` cover all work.
    """

    block_tokens: int
    block_count: int  # all KV blocks
    used_block_count: int  # held by requests, or, temporarily after a restore, by KV being moved
    waiting_block_count: int  # needed by the prompts of waiting requests (accepted, but not running)
    running_count: int
    waiting_count: int
    max_running_count: int  # --max-num-seqs, or what --tpot-target-s allows
    steps_total: int
    preemptions_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    step_age_s: float  # time since the engine last completed a step or was idle; readiness depends on it
    draining: bool
    memory: MemoryReport
    newest_epoch: int = 0  # highest known epoch of a transition; transitions of lower epochs are refused
    kept_block_count: int = 0  # free, but not given to a new request while any request runs
    prompt_token_count: int = 0  # uncomputed prompt tokens; each running prompt counts at most one full batch
    max_prompt_token_count: int = 0  # no request is admitted while prompt_token_count exceeds this; 0: no limit
    # Blocks that a draining group keeps in reserve, reported by its leader. They count as used on its members, although
    # no request needs them.
    spare_block_count: int = 0
    offline_block_count: int = 0  # held by offline requests
    offline_running_count: int = 0
    offline_waiting_count: int = 0
    offline_wanted_tokens: int = 0  # prompt tokens of further offline requests that it could admit
    offline_tokens_total: int = 0  # prompt and answer tokens computed for offline requests
    offline_lost_tokens_total: int = 0  # tokens computed for offline requests whose KV was dropped by preemptions
    uncomputed_token_count: int = 0  # uncomputed tokens of running or waiting prompts, without cached ones
    prefixes_kept_s: float = 0.0  # every prefix used within this many past seconds is still cached
    retained_block_count: int = 0  # free blocks with cached prefixes
    prefix_queries_total: int = 0  # prompt tokens of requests admitted for the first time
    prefix_hits_total: int = 0  # prompt tokens of such requests found in the prefix cache
    prefix_host_hits_total: int = 0  # of the hits, tokens copied back from host memory
    host_block_count: int = 0  # blocks in host memory with copies of cached prefixes
    offline_yields_total: int = 0  # preemptions of offline requests
    longest_token_count: int = 0  # tokens so far of the longest running online request
    longest_limit_tokens: int = 0  # tokens that this request may reach, with its whole answer
    busiest_caller_count: int = 0  # running online requests of the caller that has the most
    parked: bool = False  # takes no request until woken; its device memory is released
    wake_s: float = 0.0  # time to wake (seconds), measured or estimated; 0: it cannot be parked

    @property
    def kv_usage_fraction(self) -> float:
        return self.used_block_count / self.block_count if self.block_count else 0.0

    @property
    def retained_fraction(self) -> float:
        """Fraction of all KV blocks that are free but retain the KV of a cached prefix."""
        return self.retained_block_count / self.block_count if self.block_count else 0.0

    @property
    def prefix_hit_fraction(self) -> float:
        return self.prefix_hits_total / self.prefix_queries_total if self.prefix_queries_total else 0.0

    def has_jumped(self, since: "LoadReport") -> bool:
        """True if demand (used and waiting blocks) has grown so much since the last report that this one should be sent
        at once.
        """
        more = self.used_block_count + self.waiting_block_count - since.used_block_count - since.waiting_block_count
        return more > 0 and more * _JUMP_SHARE >= self.block_count
