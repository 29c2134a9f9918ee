"""How two workers agree on one attempt at a link, through the store of the one with the lower id.

A process group reads its peer's address under a fixed key, so keys of an earlier attempt (one side gave up, or the
link broke and is made again in the same epoch) must never be read by a later one. Each attempt of each side draws a
nonce: the lower side offers, the higher side answers the offer, the lower side accepts, and both nonces together are
part of the name under which the groups meet.
"""

import json
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Event
from typing import NotRequired, TypedDict

from torch.distributed import Store, TCPStore

from ballast.common.errors import ConfigError, DeadlineExceeded, PeerViolation, Unavailable

_POLL_S = 0.001
_POLL_MAX_S = 0.02


@dataclass(frozen=True, slots=True)
class Terms:
    """What each side must know of the other before the first frame."""

    version: int
    urgent_frame_bytes: int  # the largest frame that side has receives posted for
    bulk_frame_bytes: int
    max_message_bytes: int
    max_transfer_bytes: int


class _Hello(TypedDict):
    nonce: str
    to: NotRequired[str]
    terms: NotRequired[dict[str, int]]


@dataclass(frozen=True, slots=True)
class Meeting:
    name: str  # prefix under which both sides find each other
    peer_terms: Terms


def resolve_host(advertise_host: str | None) -> str:
    """An address of this machine. Without advice: the one its route to the outside leaves from, else loopback."""
    if advertise_host is None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing; only asks the routing table
                return str(probe.getsockname()[0])
            except OSError:
                return "127.0.0.1"
    try:
        return str(socket.getaddrinfo(advertise_host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError("advertise_host", f"{advertise_host!r} cannot be resolved: {error}") from error


def host_store(host: str, timeout_s: float) -> TCPStore:
    return TCPStore(host, 0, None, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def join_store(peer: str, address: str, deadline_s: float) -> TCPStore:
    """A client of the store at `host:port`.

    Raises:
        Unavailable: nobody listens there.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError("store_address", f"of worker {peer} must be host:port, got {address!r}")
    left_s = max(deadline_s - time.monotonic(), 0.001)
    try:
        socket.create_connection((host, int(port)), timeout=left_s).close()  # the store itself retries, and loudly
        return TCPStore(host, int(port), None, timeout=timedelta(seconds=left_s), wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        raise Unavailable(peer, f"store at {address}: {error}") from error


def meet(
    store: Store, peer: str, prefix: str, *, is_lower: bool, terms: Terms, deadline_s: float, stop: Event
) -> Meeting:
    """Agree with the peer on an attempt; both sides return the same name.

    Raises:
        DeadlineExceeded: the peer did not come.
        PeerViolation: it speaks another version.
    """
    store.set_timeout(timedelta(seconds=max(deadline_s - time.monotonic(), 0.001)))
    nonce = secrets.token_hex(8)
    mine = json.dumps(_Hello(nonce=nonce, terms=asdict(terms)))
    polls = _polls(deadline_s, stop)
    try:
        other = _offer(store, prefix, mine, nonce, polls) if is_lower else _answer(store, prefix, mine, nonce, polls)
    except RuntimeError as error:
        raise Unavailable(peer, f"store of link {prefix}: {error}") from error
    if other is None:
        raise DeadlineExceeded(f"link {prefix}: {peer} did not come")
    peer_terms = Terms(**other.get("terms", {}))
    if peer_terms.version != terms.version:
        raise PeerViolation(peer, f"speaks data plane version {peer_terms.version}, we speak {terms.version}")
    lower, higher = (nonce, other["nonce"]) if is_lower else (other["nonce"], nonce)
    return Meeting(f"{prefix}/{lower}{higher}", peer_terms)


def _offer(store: Store, prefix: str, mine: str, nonce: str, polls: Iterator[None]) -> _Hello | None:
    """Set an offer, wait for an answer to this very one, accept it."""
    store.set(f"{prefix}/offer", mine)
    for _ in polls:
        answer = _read(store, f"{prefix}/answer")
        if answer is not None and answer.get("to") == nonce:
            store.set(f"{prefix}/accept", json.dumps({"nonce": nonce, "to": answer["nonce"]}))
            return answer
    store.set(f"{prefix}/offer", "null")  # not deleted: a reader may stand between check and get
    return None


def _answer(store: Store, prefix: str, mine: str, nonce: str, polls: Iterator[None]) -> _Hello | None:
    """Answer whatever offer stands until one answer is accepted."""
    answered = ""
    for _ in polls:
        offer = _read(store, f"{prefix}/offer")
        if offer is None:
            continue
        if offer["nonce"] != answered:
            answered = offer["nonce"]
            store.set(f"{prefix}/answer", json.dumps({**json.loads(mine), "to": answered}))
        accept = _read(store, f"{prefix}/accept")
        if accept is not None and (accept["nonce"], accept.get("to")) == (answered, nonce):
            return offer
    return None


def _read(store: Store, key: str) -> _Hello | None:
    return json.loads(store.get(key)) if store.check([key]) else None


def _polls(deadline_s: float, stop: Event) -> Iterator[None]:
    """One turn now and then, until the deadline or the stop."""
    pause_s = _POLL_S
    while time.monotonic() < deadline_s:
        yield None
        if stop.wait(pause_s):
            return
        pause_s = min(pause_s * 1.5, _POLL_MAX_S)
