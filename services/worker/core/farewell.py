"""The last batches of a pipeline that is about to be dissolved (pure).

Several microbatches are in flight when the commit comes. A sequence in the first of them would wait for the others to
land, with the prompts that are in them, then for the change, and then for the first step of its new leader: all in one
gap. So the pipeline goes on without prompts until what was formed before the commit has landed. Then it drains; and a
pipeline of two stages forms one batch more, of all sequences, which makes that gap two shorter ones. With more stages
that batch would be the longest gap itself where its time goes with its tokens.
"""

from enum import Enum, auto

_STAGES = 2


class _Turn(Enum):
    NONE = auto()
    CALM = auto()  # no prompts any more
    DRAIN = auto()
    LAST = auto()  # the batch of all sequences may be formed, or has been


def has_last_batch(stage_count: int) -> bool:
    """Whether the pipeline forms one batch more at its end, of all that decode."""
    return stage_count == _STAGES


class Farewell:
    def __init__(self) -> None:
        self._turn = _Turn.NONE
        self._until_step_id = 0
        self._one_more = False

    def begin(self, departed_step_id: int, stage_count: int) -> None:
        """The commit. `departed_step_id` is of the last batch in flight."""
        self._turn = _Turn.CALM
        self._until_step_id = departed_step_id
        self._one_more = has_last_batch(stage_count)

    def end(self) -> None:
        self._turn = _Turn.NONE

    def may_form(self, in_flight_count: int) -> bool:
        """Whether a batch may be."""
        return self._turn is _Turn.CALM or (self._turn is _Turn.LAST and not in_flight_count)

    def is_over(self, landed_step_id: int, in_flight_count: int, *, has_work: bool) -> bool:
        """At each step boundary: whether this is the pipeline's last one."""
        if self._turn is _Turn.CALM and landed_step_id >= self._until_step_id:
            self._turn = _Turn.DRAIN
        if self._turn is _Turn.CALM or in_flight_count:
            return False
        if self._turn is _Turn.DRAIN and self._one_more and has_work:
            self._turn = _Turn.LAST
            return False
        return True
