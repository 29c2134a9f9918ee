"""Traffic classes and their counters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class TrafficClass(IntEnum):
    """Purpose of a message. Smaller values are more urgent."""

    CONTROL = 0
    ACTIVATION = 1
    KV = 2  # exchange and migration
    CHECKPOINT = 3
    PARAMETERS = 4

    @property
    def is_urgent(self) -> bool:
        """True for classes that are sent on the urgent lane. All others are bulk, which is sent in chunks."""
        return self <= TrafficClass.ACTIVATION


@dataclass(slots=True)
class ClassCounts:
    """Totals of one class in one direction since the link was opened."""

    messages: int = 0
    total_bytes: int = 0  # payload bytes
    waited_s: float = 0.0  # total time between queueing and posting; 0 for received traffic


@dataclass(slots=True)
class TrafficCounts:
    """All counters of a link. Each field is written by one thread; readers may see an intermediate state."""

    sent: Mapping[TrafficClass, ClassCounts] = field(default_factory=lambda: {c: ClassCounts() for c in TrafficClass})
    received: Mapping[TrafficClass, ClassCounts] = field(
        default_factory=lambda: {c: ClassCounts() for c in TrafficClass}
    )
    stale_frames: int = 0  # refused because of another epoch or a retired link
    discarded_bytes: int = 0  # received for a refused transfer
    copied_bytes: int = 0  # copied through a staging buffer, because they span several pieces
    holds: int = 0  # number of times that bulk was held back for urgent traffic
    held_s: float = 0.0
