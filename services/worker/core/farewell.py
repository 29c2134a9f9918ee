"""The last batch of a pipeline that is about to be dissolved (pure).

Several microbatches are in flight when the commit comes. Whoever is in the first of them would wait for the others to
land, then for the change, and then for the first step of its new leader: all in one gap. So once all have landed, one
more batch takes everybody at once; behind it nobody has waited, and the gap is two shorter ones.
"""

from enum import Enum, auto


class _Turn(Enum):
    NONE = auto()
    WANTED = auto()
    OPEN = auto()  # it may be formed, or has been


class Farewell:
    def __init__(self) -> None:
        self._turn = _Turn.NONE

    def begin(self) -> None:
        """There is to be such a batch."""
        self._turn = _Turn.WANTED

    def end(self) -> None:
        self._turn = _Turn.NONE

    @property
    def is_open(self) -> bool:
        """It may be formed, unless it is in flight."""
        return self._turn is _Turn.OPEN

    def opens(self) -> bool:
        """Nothing is in flight: whether the batch is to be formed now. If not, it has been, or none was to be."""
        if self._turn is _Turn.WANTED:
            self._turn = _Turn.OPEN
            return True
        self._turn = _Turn.NONE
        return False
