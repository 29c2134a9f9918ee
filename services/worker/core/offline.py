"""Offline work of a group: requests of class batch. Three rules keep it from affecting online work.

Not counted: its blocks and places in the batch count as free in all decisions about online work. Preempted at once:
between two steps it yields the blocks and places that online sequences need, the newest sequence first, so the oldest
always finishes. Filling only: it is added to a batch only within the batch's time allowance (`policy.harvest`).
"""

import math

from ballast.common.cost import Chunk
from services.worker.core.limits import WorkerLimits
from services.worker.core.sequence import Sequence
from services.worker.policy.harvest import (
    NO_LIMIT_S,
    Harvest,
    OfflineView,
    OnlineView,
    PriceList,
    allowance_s,
    efficient_tokens,
    fill,
    safepoint_layers,
    wanted_tokens,
)

Chunks = list[tuple[Sequence, int]]  # (sequence, number of tokens)


def left_of(sequence: Sequence) -> int:
    """Number of the sequence's tokens without KV."""
    return sequence.token_count - sequence.computed_tokens


def _online_view(sequence: Sequence, at_s: float) -> OnlineView:
    due_in_s = math.inf
    if sequence.first_token_at_s is None:
        due_in_s = sequence.arrival[0] + sequence.targets.ttft_s - at_s
    return OnlineView(sequence.targets.tpot_s, due_in_s, left_of(sequence))


class OfflineWork:
    def __init__(self, limits: WorkerLimits, harvest: Harvest) -> None:
        self.yields_total = 0
        self.lost_tokens_total = 0  # tokens computed, then dropped and recomputed
        self.preemptions_total = 0  # batches preempted within their step
        self.paused = False  # True: no offline sequence runs or is admitted
        self._limits = limits
        self._harvest = harvest
        self._priced = harvest.cost()
        self._efficient_tokens = efficient_tokens(self._priced, limits.max_batch_tokens)
        self._online_s = 0.0  # seconds that the last batch with online work would have taken without offline work

    @property
    def efficient_tokens(self) -> int:
        """Number of prompt tokens with which a batch almost reaches the peak throughput. Recomputed when costs
        change.
        """
        cost = self._harvest.cost()
        if cost is not self._priced:
            self._priced = cost
            self._efficient_tokens = efficient_tokens(cost, self._limits.max_batch_tokens)
        return self._efficient_tokens

    def wanted_tokens(self, running: list[Sequence]) -> int:
        """Number of prompt tokens of further offline sequences that could be admitted."""
        return wanted_tokens(self.efficient_tokens, [left_of(s) for s in running])

    def note_yield(self, lost_tokens: int) -> None:
        self.yields_total += 1
        self.lost_tokens_total += lost_tokens

    def note_preempted(self, lost_tokens: int) -> None:
        self.preemptions_total += 1
        self.lost_tokens_total += lost_tokens

    def fill(
        self,
        decodes: list[Sequence],
        chunks: Chunks,
        ready: list[Sequence],
        *,
        stage_count: int,
        in_flight_count: int,
        prefill_limit: int | None,
        online_in_flight: bool,
        online: list[Sequence],
        place_count: int,
        at_s: float,
    ) -> int:
        """Add offline sequences to a batch of online work, which may be empty. Returns its `safepoint_layers`.

        Args:
            decodes: Decodes of the batch; extended.
            chunks: Prompt chunks of the batch; extended.
            ready: Offline sequences that are in no batch, in order of service.
            stage_count: Stages of the group.
            in_flight_count: Batches in flight.
            prefill_limit: Maximum prompt tokens of a batch that has decodes; None: no limit.
            online_in_flight: True if batches in flight have online sequences.
            online: All running online sequences.
            place_count: Maximum number of running online sequences.
            at_s: Current time.
        """
        cost, alone = self._harvest.cost(), not (decodes or chunks)
        if alone and in_flight_count >= stage_count:
            return 0
        room = self._limits.max_batch_tokens - len(decodes) - sum(count for _, count in chunks)
        offline = [OfflineView(s.planned_tokens, s.left_tokens, s.step_id) for s in ready]
        if cost is None:
            if not alone or online_in_flight:
                return 0
            prices, limit_s = PriceList.free(), NO_LIMIT_S
        else:
            prices = PriceList(cost, [Chunk(s.computed_tokens, 1) for s in decodes])
            for sequence, count in chunks:
                prices.add(sequence.planned_tokens, count)
            if not alone:
                self._online_s = prices.seconds
            limit_s = NO_LIMIT_S
            if not alone or online_in_flight:
                most, views = self._limits.max_batch_tokens, [_online_view(s, at_s) for s in online]
                limit_s = allowance_s(
                    self._harvest, self._online_s, stage_count, in_flight_count + 1, views, place_count, most
                )
        prompt_tokens = self.efficient_tokens
        if prefill_limit is not None and not alone:
            prompt_tokens = max(0, min(prompt_tokens, prefill_limit - sum(count for _, count in chunks)))
        for index, count in fill(prices, offline, limit_s, room, prompt_tokens):
            sequence = ready[index]
            if sequence.left_tokens == 1:
                decodes.append(sequence)
            else:
                chunks.append((sequence, count))
        return safepoint_layers(self._harvest, prices.seconds) if alone else 0
