"""What an instance says about itself: the numbers that routing, forecasting and `ballast status` are made from."""

from dataclasses import dataclass

from ballast.common.errors import InvariantViolation
from ballast.common.record import record

HASTY_REPORT_S = 0.01  # between two reports where demand jumps
_JUMP_SHARE = 16  # of the blocks, one part


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Device memory in bytes. Parameters + KV + free = budget, always (I3)."""

    budget_bytes: int
    parameter_bytes: int
    kv_bytes: int
    free_bytes: int
    extent_bytes: int = 0  # memory is dealt out in multiples of this; 0: it does not say

    def check(self) -> None:
        if self.parameter_bytes + self.kv_bytes + self.free_bytes != self.budget_bytes:
            raise InvariantViolation(f"device memory does not add up: {self}")


@record(kw_only=True)
class LoadReport:
    """State of one instance after a step. Counts of blocks are the minimum over the stages of its group.

    Counts of requests, of their blocks and of their tokens are those of online work: what offline work holds is free
    for it. Offline work has fields of its own; totals and `memory` are of all work.
    """

    block_tokens: int
    block_count: int  # KV blocks in all
    used_block_count: int  # not free: held by requests, or, for moments after a restore, by KV that is still moving
    waiting_block_count: int  # needed by the prompts of accepted requests that do not run yet, head of line included
    running_count: int
    waiting_count: int
    max_running_count: int  # --max-num-seqs, or what --tpot-target-s allows
    steps_total: int
    preemptions_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    step_age_s: float  # since the engine last completed a step or was idle; readiness is judged by it
    draining: bool
    memory: MemoryReport
    newest_epoch: int = 0  # of a transition that the instance has heard of; it takes part in no lower one
    kept_block_count: int = 0  # free ones that are for no newcomer while anything runs
    prompt_token_count: int = 0  # of prompts here, in no batch yet; one that runs counts as a full batch at most
    max_prompt_token_count: int = 0  # from so many on nobody is let in; 0: however many
    # Of a leader whose group before dissolves: blocks that the group before keeps to grow into. They count as used by
    # its members, and no request needs them.
    spare_block_count: int = 0
    offline_block_count: int = 0  # held by offline requests
    offline_running_count: int = 0
    offline_waiting_count: int = 0
    offline_wanted_tokens: int = 0  # of prompts of more offline requests that it could begin
    offline_tokens_total: int = 0  # computed for offline requests, of prompts and answers
    offline_lost_tokens_total: int = 0  # computed for offline requests that yielded, and computed anew
    uncomputed_token_count: int = 0  # of prompts that run or wait here: in no batch yet, and not to be had from others
    prefixes_kept_s: float = 0.0  # whatever was used within so many seconds is still here
    retained_block_count: int = 0  # free ones whose KV is kept for prompts that begin so
    prefix_queries_total: int = 0  # tokens of requests let in for the first time
    prefix_hits_total: int = 0  # those of them whose KV was there
    prefix_host_hits_total: int = 0  # of these, those whose KV came back from host memory
    host_block_count: int = 0  # of host memory, with copies of what is retained or was
    offline_yields_total: int = 0  # times an offline request gave its blocks or its place to online work
    longest_token_count: int = 0  # of the longest online request that runs
    longest_limit_tokens: int = 0  # that this one may come to, with all of its answer
    busiest_caller_count: int = 0  # online requests that run, of the caller that has the most of them
    parked: bool = False  # takes no request until woken; its device memory is given back, or about to be
    wake_s: float = 0.0  # that waking takes, as measured lately or estimated; 0: it cannot be parked

    @property
    def kv_usage_fraction(self) -> float:
        return self.used_block_count / self.block_count if self.block_count else 0.0

    @property
    def retained_fraction(self) -> float:
        """Free KV blocks that retain the KV of a prefix."""
        return self.retained_block_count / self.block_count if self.block_count else 0.0

    @property
    def prefix_hit_fraction(self) -> float:
        return self.prefix_hits_total / self.prefix_queries_total if self.prefix_queries_total else 0.0

    def has_jumped(self, since: "LoadReport") -> bool:
        """So much more KV is wanted than was told that nobody should learn it only with the next regular report."""
        more = self.used_block_count + self.waiting_block_count - since.used_block_count - since.waiting_block_count
        return more > 0 and more * _JUMP_SHARE >= self.block_count
