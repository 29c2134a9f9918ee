"""Traffic classes and what is counted for each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class TrafficClass(IntEnum):
    """What a message is for. The smaller, the more urgent."""

    CONTROL = 0
    ACTIVATION = 1
    KV = 2  # exchange and migration
    CHECKPOINT = 3
    PARAMETERS = 4

    @property
    def is_urgent(self) -> bool:
        """Urgent traffic has a group of its own; the rest is bulk and travels in chunks."""
        return self <= TrafficClass.ACTIVATION


@dataclass(slots=True)
class ClassCounts:
    """Totals of one class in one direction since the link came up."""

    messages: int = 0
    total_bytes: int = 0  # of payload
    waited_s: float = 0.0  # between being handed over and being posted; 0 for what was received


@dataclass(slots=True)
class TrafficCounts:
    """All a link counts. Each field is written by one thread; readers may see a moment in between."""

    sent: Mapping[TrafficClass, ClassCounts] = field(default_factory=lambda: {c: ClassCounts() for c in TrafficClass})
    received: Mapping[TrafficClass, ClassCounts] = field(
        default_factory=lambda: {c: ClassCounts() for c in TrafficClass}
    )
    stale_frames: int = 0  # refused, because they carry another epoch or the link is retired
    discarded_bytes: int = 0  # arrived for a transfer that was refused
    copied_bytes: int = 0  # went through a staging buffer because of piece borders
    holds: int = 0  # times bulk stood back for urgent traffic
    held_s: float = 0.0
