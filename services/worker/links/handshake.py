"""The first messages between two workers on a new connection, and mutual authentication.

    caller  hello      from, to, incarnation, lane; its limits; a nonce
    host    challenge  a nonce
    caller  proof
    host    hello      the host's, with its proof                    (when it wants that link, which may be later)
    caller  "!"        it is still waiting

With a cluster secret, a proof is an HMAC over all lines so far and the sender's role, so it is invalid on another
connection, for another worker, incarnation or lane, or in the other direction. Without a secret, proofs are empty and
ignored.
"""

import hmac
import json
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import cast

from ballast.common.errors import PeerViolation

MAX_LINE_BYTES = 4096
_NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Terms:
    """Properties that each side must know about the other before the first frame."""

    version: int
    transport: str  # how the following frames are transported
    urgent_frame_bytes: int  # size of the receives that this side posts
    bulk_frame_bytes: int
    max_message_bytes: int
    max_transfer_bytes: int


@dataclass(frozen=True, slots=True)
class Hello:
    worker_id: str
    incarnation: int  # 0: not known yet
    to: str  # id of the worker that is addressed
    lane: str  # purpose of the connection
    terms: Terms


_NUMBERS = tuple(field.name for field in fields(Terms) if field.name != "transport")


def hello_line(hello: Hello) -> bytes:
    return _line(asdict(hello) | {"nonce": secrets.token_hex(_NONCE_BYTES)})


def challenge_line() -> bytes:
    return _line({"nonce": secrets.token_hex(_NONCE_BYTES)})


def proof_line(proof: str) -> bytes:
    return _line({"proof": proof})


def refusal_line(why: str) -> bytes:
    return _line({"refused": why})


def proof_of(secret: bytes | None, role: str, *said: bytes) -> str:
    """Proof of the cluster secret; empty without one. `role`: "caller" or "host"; `said`: all lines so far, as sent."""
    if secret is None:
        return ""
    lengths = b"".join(len(line).to_bytes(4, "little") for line in said)
    return hmac.digest(secret, b"\0".join((b"ballast link", role.encode(), lengths, *said)), "sha256").hex()


def is_proof(given: str, secret: bytes | None, role: str, *said: bytes) -> bool:
    """True if the proof is valid, or if there is no secret."""
    return secret is None or hmac.compare_digest(given.encode(), proof_of(secret, role, *said).encode())


def parse_line(line: bytes) -> Mapping[str, object]:
    """Parse a line of the protocol.

    Raises:
        ValueError: the line is malformed.
    """
    try:
        said = json.loads(line)
    except RecursionError as error:
        raise ValueError("unclosed brackets") from error
    if not isinstance(said, dict):
        raise ValueError("no object")
    return cast(dict[str, object], said)


def parse_hello(line: bytes) -> Hello:
    """Parse a hello.

    Raises:
        ValueError: the line is malformed.
    """
    said = parse_line(line)
    terms = said.get("terms")
    if not isinstance(terms, dict):
        raise ValueError("no terms")
    terms = cast(dict[str, object], terms)
    numbers = {name: _int(terms, name, least=1) for name in _NUMBERS}
    return Hello(
        worker_id=_str(said, "worker_id"),
        incarnation=_int(said, "incarnation", least=0),
        to=_str(said, "to"),
        lane=_str(said, "lane"),
        terms=Terms(transport=_str(terms, "transport"), **numbers),
    )


def parse_proof(line: bytes) -> str:
    """Parse a proof.

    Raises:
        ValueError: the line is malformed.
    """
    proof = parse_line(line).get("proof")
    if not isinstance(proof, str):
        raise ValueError("no proof")
    return proof


def check_terms(mine: Hello, theirs: Hello) -> None:
    if theirs.terms.version != mine.terms.version:
        why = f"speaks data plane version {theirs.terms.version}, this worker speaks {mine.terms.version}"
        raise PeerViolation(theirs.worker_id, why)
    if theirs.terms.transport != mine.terms.transport:
        why = f"its --transport is {theirs.terms.transport}, but this worker's is {mine.terms.transport}"
        raise PeerViolation(theirs.worker_id, why)


def _line(said: Mapping[str, object]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _int(said: Mapping[str, object], name: str, *, least: int) -> int:
    value = said.get(name)
    if type(value) is not int or not least <= value < 1 << 63:  # isinstance accepts a bool as an int
        raise ValueError(f"{name} must be a whole number of at least {least}")
    return value


def _str(said: Mapping[str, object], name: str) -> str:
    value = said.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a word")
    return value


# ------------------------------------------------------------ on a blocking socket


def read_line(connection: socket.socket, deadline_s: float) -> bytes:
    """Read exactly one line. It is not read byte by byte, because each call needs the GIL, which the engine holds."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(left_s(deadline_s))
        there = connection.recv(MAX_LINE_BYTES - len(line), socket.MSG_PEEK)
        if not there:  # or if it sends too many bytes
            raise ConnectionResetError("it disconnected")
        line += connection.recv(there.find(b"\n") + 1 or len(there))
    return line


def read_exactly(connection: socket.socket, size: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(left_s(deadline_s))
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other side disconnected")
        data += part
    return data


def left_s(deadline_s: float) -> float:
    """Return the remaining seconds, but never zero, which would make a socket non-blocking."""
    return max(deadline_s - time.monotonic(), 0.001)
