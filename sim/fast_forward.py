"""Steps of a lone instance in which nothing is decided, each of them an event, and no books kept until they end.

While an engine fast-forwards its core stands still: it is told of the steps when somebody asks (see
`services.worker.core.plain`). When a step ends, and what its dispatchers are told and when, is unchanged. Books of
dispatchers and clients, too, are kept up to date only where they are read.
"""

from collections.abc import Sequence

from ballast.common.load import LoadReport
from services.worker.core.plain import PlainSteps

# The numbers of places, once for all tokens of all sequences: most of what a run remembers would be such numbers.
_PLACE_COUNT = 1 << 16
_PLACES = tuple(range(_PLACE_COUNT))


def places(first: int, count: int) -> Sequence[int]:
    """So many numbers."""
    end = first + count
    return _PLACES[first:end] if end <= _PLACE_COUNT else range(first, end)


class Pace:
    """What the load is after each step."""

    __slots__ = ("at_s", "before", "sequence_count")

    def __init__(self, before: LoadReport, sequence_count: int, at_s: float) -> None:
        """`before`: the first step, at `at_s`."""
        self.before = before
        self.at_s = at_s
        self.sequence_count = sequence_count

    @property
    def waiting_count(self) -> int:
        """Requests on the worker for which there is no room, throughout."""
        return self.before.waiting_count

    def report(self, landed: int, used_block_count: int, at_s: float) -> LoadReport:
        """After so many steps. What of retained KV has made way for them is said when they end."""
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
    """The part of the steps that goes to one dispatcher. Holds no reference to the fast-forward: no cycle."""

    __slots__ = ("handles", "pace", "places", "seen_handle")

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.handles: list[int] = []
        self.places: list[int] = []  # of the first step's tokens
        self.seen_handle = 0

    def token_ids(self, first: int, count: int) -> list[int]:
        """Token ids of `count` steps from the `first`-th on (counted from 1), handle by handle."""
        ids: list[int] = []
        for place in self.places:
            ids += places(place + first - 1, count)
        return ids


class FastForward:
    """Steps of one instance in which nothing is decided, until something comes up."""

    __slots__ = ("_report", "landed", "pace", "plain", "shares", "used_block_count")

    def __init__(self, plain: PlainSteps, before: LoadReport, at_s: float) -> None:
        """`before`: what the load is before the first step, at `at_s`."""
        self.plain = plain
        self.pace = Pace(before, len(plain.sequences), at_s)
        self.landed = 0  # steps
        self.used_block_count = before.used_block_count  # after the last step taken
        self.shares: dict[int, Share] = {}  # by stream
        self._report = before
        for sequence in plain.sequences:
            stream_id, handle = sequence.key
            share = self.shares.get(stream_id) or self.shares.setdefault(stream_id, Share(self.pace))
            share.handles.append(handle)
            share.places.append(sequence.token_count)

    def token_ids(self) -> list[Sequence[int]]:
        """Token ids of each sequence, of the steps that have landed: a token is the number of its place."""
        return [places(s.token_count, self.landed) for s in self.plain.sequences]

    def load(self, at_s: float) -> LoadReport:
        """After the last step that has landed."""
        if self._report.steps_total != self.pace.before.steps_total + self.landed:
            self._report = self.pace.report(self.landed, self.used_block_count, at_s)
        return self._report
