"""The first batches of a worker that leads alone again after a restore (pure).

The KV that its sequences still lack at the commit comes within milliseconds, one sequence after the other. Whoever is
complete first would run a step alone, and all others would wait for the end of it: so the first batch waits for all
of them, but no longer than such a step would take. Prompts wait for the batch after it, and for a while they come in
small pieces: those that have stood back would all be in one batch, and whoever decodes has just waited.
"""

from enum import Enum, auto


class Turn(Enum):
    """What may be done at this step boundary."""

    AS_USUAL = auto()
    WAIT = auto()
    FIRST = auto()  # the batch that has been waited for may be formed
    GENTLY = auto()  # prompts may come, in small pieces
    OVER = auto()  # all as usual; said once


class Regroup:
    def __init__(self) -> None:
        self._turn = Turn.AS_USUAL
        self._until_s: float = 0.0
        self._gently_s: float = 0.0

    def begin(self, now_s: float, patience_s: float, gently_s: float) -> None:
        """`patience_s` for the KV of all; `gently_s` is how long prompts stand back from then on."""
        self._turn = Turn.WAIT
        self._until_s = now_s + patience_s
        self._gently_s = gently_s

    def end(self) -> None:
        """The layout changes once more, or the group is lost."""
        self._turn = Turn.AS_USUAL

    @property
    def is_over(self) -> bool:
        """All is as usual, or it has never begun."""
        return self._turn in (Turn.AS_USUAL, Turn.OVER)

    @property
    def wakes_at_s(self) -> float | None:
        """When `turn` wants to be called although nothing has happened."""
        return self._until_s if self._turn is Turn.WAIT else None

    def turn(self, now_s: float, incomplete_count: int) -> Turn:
        """At each step boundary. `incomplete_count`: sequences whose KV is on its way."""
        match self._turn:
            case Turn.WAIT if not incomplete_count or now_s >= self._until_s:
                self._turn = Turn.FIRST
                self._until_s = now_s + self._gently_s
            case Turn.FIRST | Turn.GENTLY:
                self._turn = Turn.GENTLY if now_s < self._until_s else Turn.OVER
            case Turn.OVER:
                self._turn = Turn.AS_USUAL
            case _:
                pass
        return self._turn
