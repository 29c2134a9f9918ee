"""This worker's links to other members, which are opened while a layout is prepared, and the messages sent over
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ballast.common.errors import BallastError
from ballast.common.ids import Epoch, WorkerId
from ballast.service.logs import get_logger
from services.worker.core.batch import Batch, StepResult
from services.worker.core.transition_messages import LinksUp, PreparationFailed
from services.worker.core.turns import MemberEvent
from services.worker.links.traffic import TrafficClass
from services.worker.pipeline.events import LinkMade, PlanReceived, Woken
from services.worker.pipeline.role import MemberRole
from services.worker.pipeline.wire import Topic, batch_to_bytes, failure_to_bytes, result_to_bytes

if TYPE_CHECKING:
    import torch

    from services.worker.links.connection import Link
    from services.worker.links.member_side import Plane

# Epoch of the links over which workers that may soon share a group send each other layers, independent of the layout.
LAYERS = Epoch(1 << 62)
_LINK_TIMEOUT_S = 5.0
_KEPT_S = 60.0
_MEETING_TIMEOUT_S = 1.0  # short, because the other side may not connect
_SEND_TIMEOUT_S = 5.0
_HEAD_BYTES = 2048  # a longer batch head (it contains prompts) is sent before its hidden states
_META_BYTES = 2048  # a longer body of a message without a tensor is sent as a tensor of bytes


class Links:
    """This worker's links. Methods without an epoch use the links of the current layout."""

    def __init__(
        self, plane: Plane, role: MemberRole, now: Callable[[], float], post: Callable[[MemberEvent], None]
    ) -> None:
        self._plane = plane
        self._role = role
        self._now = now
        self._post = post
        self.missing: set[WorkerId] = set()  # requested peers whose links are not open yet
        self._partners: dict[WorkerId, float] = {}  # partner -> when the planner last named it
        self._meeting: set[tuple[WorkerId, Epoch]] = set()  # links to partners that are being connected

    def to(self, peer: WorkerId, epoch: Epoch | None = None) -> Link | None:
        """Return the link to a peer; None: there is no link, or it has ended. `epoch`: None for the current layout."""
        return self._plane.link(peer, self._role.epoch if epoch is None else epoch)

    # ------------------------------------------------------------ sending

    def send(
        self,
        to: WorkerId,
        traffic: TrafficClass,
        topic: Topic,
        meta: bytes,
        tensor: torch.Tensor | None = None,
        stream: int = 0,
        epoch: Epoch | None = None,
    ) -> Future[None] | None:
        """Send a message. Either it is delivered or the link ends, which is reported as an event, so no message is lost
        silently. The future completes when the message has been sent.
        """
        link = self.to(to, epoch)
        return None if link is None else self.send_over(link, traffic, topic, meta, tensor, stream)

    def send_over(
        self,
        link: Link,
        traffic: TrafficClass,
        topic: Topic,
        meta: bytes,
        tensor: torch.Tensor | None = None,
        stream: int = 0,
    ) -> Future[None] | None:
        """Send over the link on which a message arrived, which may not have been reported as open yet."""
        try:
            if tensor is None and len(meta) > _META_BYTES:
                tensor, meta = link.as_tensor(meta), b""
            return link.send(traffic, topic, meta=meta, tensor=tensor, stream=stream, timeout_s=_SEND_TIMEOUT_S)
        except BallastError as error:
            if not link.has_ended:  # otherwise the peer knows it, or the receiver is notified
                why = str(error)
                get_logger().error("message to a member was not sent", to=link.peer_id, topic=topic.name, why=why)
                link.give_up(f"{topic.name} could not be sent: {why}")
            return None

    def pass_on(self, topic: Topic, about: Epoch) -> None:
        """Send a message about an epoch to the next stage, with the priority of an activation so that it follows the
        last batch.
        """
        if not self._role.is_last:
            self.send(self._role.next_stage, TrafficClass.ACTIVATION, topic, b"", stream=about)

    def pass_down(self, topic: Topic, body: bytes) -> None:
        """Send a message with a body to the next stage, in the same order as `pass_on`."""
        if not self._role.is_last:
            self.send(self._role.next_stage, TrafficClass.ACTIVATION, topic, body)

    def pass_batch(self, batch: Batch, hidden_TD: torch.Tensor | None) -> Future[None] | None:
        """Send a batch to the next stage."""
        to, head = self._role.next_stage, batch_to_bytes(batch)
        if len(head) > _HEAD_BYTES:
            self.send(to, TrafficClass.ACTIVATION, Topic.BATCH_HEAD, head)
            head = b""
        return self.send(to, TrafficClass.ACTIVATION, Topic.BATCH, head, hidden_TD)

    def send_result(self, result: StepResult | tuple[int, str]) -> None:
        """Send the leader a batch's result, or its step id and why it failed."""
        body = result_to_bytes(result) if isinstance(result, StepResult) else failure_to_bytes(*result)
        self.send(self._role.leader, TrafficClass.ACTIVATION, Topic.RESULT, body)

    def ask_for_layer(self, peer: WorkerId, epoch: Epoch, layer: int, layout: bytes) -> bool:
        """Request a layer in the byte layout `layout`. False: the peer is unreachable."""
        if self.to(peer, epoch) is None:
            return False
        self.send(peer, TrafficClass.CONTROL, Topic.LAYER_WANTED, layout, stream=layer, epoch=epoch)
        return True

    # ------------------------------------------------------------ connecting and ending

    def connect(
        self,
        epoch: Epoch,
        peers: Sequence[WorkerId],
        addresses: Mapping[WorkerId, str],
        lives: Mapping[WorkerId, int],
    ) -> Sequence[LinksUp]:
        """Connect to peers. Returns the transition's event if all links are open; otherwise `LinkMade` follows for the
        others.
        """
        self.missing = {peer for peer in peers if self.to(peer, epoch) is None}
        for peer in sorted(self.missing):
            future = self._plane.warm(peer, addresses[peer], epoch, _LINK_TIMEOUT_S, lives.get(peer, 0))
            future.add_done_callback(lambda f, p=peer: self._post(LinkMade(epoch, p, f)))
        return () if self.missing else (LinksUp(self._now(), epoch),)

    def join(self, event: PlanReceived, peers: Sequence[WorkerId]) -> None:
        """Start connecting for the plan's epoch while the engine runs a step, so that `connect` finds open links.
        Thread-safe.
        """
        for peer in peers:
            address, life = event.data_addresses[peer], event.lives.get(peer, 0)
            self._plane.warm(peer, address, event.plan.epoch, _LINK_TIMEOUT_S, life)

    def meet(self, peer: WorkerId, address: str, epoch: Epoch) -> None:
        """Try to open a link to a worker of another group for this epoch. A failure is not reported."""
        self._plane.retire(epoch, (peer,))
        self._make(peer, address, epoch)

    def keep(self, partners: Mapping[WorkerId, str]) -> None:
        """Keep links of `LAYERS` to these partners open, so that a later layout finds open connections. Links to
        partners named earlier are kept for a minute, because a worker outside the layout may be loading its layers over
        them. The partners do the same for this worker. A link that fails to open is retried when the partner is named
        again.
        """
        now_s = self._now()
        self._partners |= dict.fromkeys(partners, now_s)
        for peer in [peer for peer, named_s in self._partners.items() if now_s - named_s > _KEPT_S]:
            del self._partners[peer]
            if (link := self.to(peer, LAYERS)) is not None:
                link.retire()
        for peer, address in partners.items():
            self._make(peer, address, LAYERS)

    def givers(self) -> list[WorkerId]:
        """Peers from which layers can be requested, independent of the layout."""
        return [peer for peer in sorted(self._partners) if self.to(peer, LAYERS) is not None]

    def _make(self, peer: WorkerId, address: str, epoch: Epoch) -> None:
        key = (peer, epoch)
        if key in self._meeting or self.to(peer, epoch) is not None:
            return

        def met(_: Future[Link]) -> None:
            self._meeting.discard(key)
            self._post(Woken())

        self._meeting.add(key)
        self._plane.warm(peer, address, epoch, timeout_s=_MEETING_TIMEOUT_S).add_done_callback(met)

    def made(self, event: LinkMade) -> LinksUp | PreparationFailed | None:
        """Record the outcome of connecting. Returns the transition's event if this was the last link, or if it has
        failed.
        """
        error, now_s = event.link.exception(), self._now()
        if error is not None:
            return PreparationFailed(now_s, event.epoch, f"no link to {event.peer}: {error}")
        get_logger().debug("link is up", peer=event.peer, epoch=event.epoch)
        self.missing.discard(event.peer)
        return None if self.missing else LinksUp(now_s, event.epoch)

    def retire(self, before: Epoch) -> None:
        """Retire links of older epochs, which then refuse arriving messages."""
        self._plane.retire(before)

    def close(self) -> None:
        self._plane.close()
