"""Fast-forward: decode-only steps of an instance that serves alone. Each step is one event, but the core handles them
all at once: at the end, or earlier on demand (see `services.worker.core.plain`).

The times of steps and of messages to dispatchers are unchanged. Dispatchers and clients are likewise updated only when
their state is read.
"""

from collections.abc import Sequence

from ballast.common.load import LoadReport
from services.worker.core.plain import PlainSteps
from services.worker.core.sequence import Sequence as Running

# Position numbers, shared by all sequences, because they would otherwise take most of a run's memory.
_PLACE_COUNT = 1 << 16
_PLACES = tuple(range(_PLACE_COUNT))


def places(first: int, count: int) -> Sequence[int]:
    """`count` consecutive position numbers from `first` on."""
    end = first + count
    return _PLACES[first:end] if end <= _PLACE_COUNT else range(first, end)


class FastForwardPace:
    """Computes the load after each step of a fast-forward."""

    __slots__ = ("at_s", "before", "sequence_count")

    def __init__(self, before: LoadReport, sequence_count: int, at_s: float) -> None:
        """`before`: the load before the first step, at `at_s`."""
        self.before = before
        self.at_s = at_s
        self.sequence_count = sequence_count

    @property
    def waiting_count(self) -> int:
        """Number of requests that wait on the worker for room, constant during the fast-forward."""
        return self.before.waiting_count

    def report(self, landed: int, used_block_count: int, at_s: float) -> LoadReport:
        """The load after `landed` steps. Evictions of retained KV are reported at the end."""
        before = self.before
        return LoadReport(
            block_tokens=before.block_tokens,
            block_count=before.block_count,
            used_block_count=used_block_count,
            waiting_block_count=before.waiting_block_count,
            running_count=before.running_count,
            waiting_count=before.waiting_count,
            max_running_count=before.max_running_count,
            steps_total=before.steps_total + landed,
            preemptions_total=before.preemptions_total,
            prompt_tokens_total=before.prompt_tokens_total,
            generation_tokens_total=before.generation_tokens_total + landed * self.sequence_count,
            step_age_s=0.0,
            draining=before.draining,
            memory=before.memory,
            newest_epoch=before.newest_epoch,
            kept_block_count=before.kept_block_count,
            prompt_token_count=before.prompt_token_count,
            max_prompt_token_count=before.max_prompt_token_count,
            spare_block_count=before.spare_block_count,
            offline_wanted_tokens=before.offline_wanted_tokens,
            offline_tokens_total=before.offline_tokens_total,
            offline_yields_total=before.offline_yields_total,
            offline_lost_tokens_total=before.offline_lost_tokens_total,
            wake_s=before.wake_s,
            retained_block_count=before.retained_block_count,
            prefix_queries_total=before.prefix_queries_total,
            prefix_hits_total=before.prefix_hits_total,
            longest_token_count=before.longest_token_count + (landed if before.longest_token_count else 0),
            longest_limit_tokens=before.longest_limit_tokens,
            prefix_host_hits_total=before.prefix_host_hits_total,
            host_block_count=before.host_block_count,
            busiest_caller_count=before.busiest_caller_count,
            uncomputed_token_count=before.uncomputed_token_count,
            prefixes_kept_s=before.prefixes_kept_s + at_s - self.at_s,
        )


class Share:
    """One dispatcher's part of the steps. Does not reference the fast-forward, which avoids a cycle."""

    __slots__ = ("handles", "pace", "places", "seen_handle")

    def __init__(self, pace: FastForwardPace) -> None:
        self.pace = pace
        self.handles: list[int] = []
        self.places: list[int] = []  # positions of the first step's tokens
        self.seen_handle = 0

    def token_ids(self, first: int, count: int) -> list[int]:
        """Token ids of `count` steps from step `first` on (counted from 1), one handle after the other."""
        ids: list[int] = []
        for place in self.places:
            ids += places(place + first - 1, count)
        return ids


class FastForward:
    """The decode-only steps of one instance until another event ends them."""

    __slots__ = ("_report", "landed", "pace", "plain", "shares", "used_block_count")

    def __init__(self, plain: PlainSteps, before: LoadReport, at_s: float) -> None:
        """`before`: the load before the first step, at `at_s`."""
        self.plain = plain
        self.pace = FastForwardPace(before, len(plain.sequences), at_s)
        self.landed = 0  # completed steps
        self.used_block_count = before.used_block_count  # blocks used after the last completed step
        self.shares: dict[int, Share] = {}  # stream id -> its dispatcher's share
        self._report = before
        by_stream: dict[int, list[Running]] = {}
        for sequence in plain.sequences:
            by_stream.setdefault(sequence.key[0], []).append(sequence)
        for stream_id, sequences in by_stream.items():
            share = self.shares[stream_id] = Share(self.pace)
            share.handles = [s.key[1] for s in sequences]
            share.places = [s.token_count for s in sequences]

    def token_ids(self) -> list[Sequence[int]]:
        """Token ids of each sequence in the completed steps; a token is its position."""
        return [places(s.token_count, self.landed) for s in self.plain.sequences]

    def load(self, at_s: float) -> LoadReport:
        """The load after the last completed step."""
        if self._report.steps_total != self.pace.before.steps_total + self.landed:
            self._report = self.pace.report(self.landed, self.used_block_count, at_s)
        return self._report
