"""A receiver that records what arrives, and the byte patterns that tests send."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Condition

import torch

from services.worker.links.connection import Link
from services.worker.links.ports import LinkEnding, Message
from services.worker.links.transfer import Opening, Refusal, TransferOutcome

ECHO = 7  # topic: send the message back
REFUSE = 9  # topic: refuse the transfer
COUNT_URGENT = 11  # topic: the record of the transfer's end counts the urgent messages received before it


def pattern(size_bytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """A sum that depends on every byte and its position."""
    flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors]).to(torch.int64)
    return int((flat * (torch.arange(flat.numel()) % 65_521 + 1)).sum()) if flat.numel() else 0


@dataclass
class Ended:
    stream: int
    outcome: str
    checksum: int
    urgent_before: int


@dataclass
class Recorder:
    """A receiver that records what arrives. A transfer is written into tensors of the sizes in its opening message, or
    into a single tensor if it has none.
    """

    messages: list[Message] = field(default_factory=list[Message])
    ended: list[Ended] = field(default_factory=list[Ended])
    endings: dict[str, LinkEnding] = field(default_factory=dict[str, LinkEnding])
    openings: list[Opening] = field(default_factory=list[Opening])

    def __post_init__(self) -> None:
        self.changed = Condition()
        self._destinations: dict[tuple[str, int], list[torch.Tensor]] = {}

    def device_of(self, topic: int) -> torch.device | str:
        return "cpu"

    def on_message(self, link: Link, message: Message) -> None:
        if message.topic == ECHO:
            link.send(message.traffic, 0, meta=message.meta, tensor=message.tensor, stream=message.stream)
        with self.changed:
            self.messages.append(message)
            self.changed.notify_all()

    def on_opening(self, link: Link, opening: Opening) -> Sequence[torch.Tensor] | Refusal:
        if opening.topic == REFUSE:
            return Refusal("not wanted")
        sizes = json.loads(opening.meta) if opening.meta else [opening.total_bytes]
        destination = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        with self.changed:
            self.openings.append(opening)
            self._destinations[link.peer_id, opening.transfer] = destination
            self.changed.notify_all()
        return destination

    def on_transfer_end(self, link: Link, opening: Opening, outcome: TransferOutcome) -> None:
        with self.changed:
            tensors = self._destinations.pop((link.peer_id, opening.transfer))
            self.ended.append(Ended(opening.stream, outcome.value, checksum(tensors), len(self.messages)))
            self.changed.notify_all()

    def on_link_end(self, link: Link, ending: LinkEnding) -> None:
        with self.changed:
            self.endings[link.peer_id] = ending
            self.changed.notify_all()

    def wait(self, what: str, count: int, timeout_s: float = 60.0) -> None:
        """Waits until the list named `what` has at least `count` items."""
        with self.changed:
            if not self.changed.wait_for(lambda: len(getattr(self, what)) >= count, timeout=timeout_s):
                raise TimeoutError(f"{len(getattr(self, what))} of {count} {what} after {timeout_s} s")
