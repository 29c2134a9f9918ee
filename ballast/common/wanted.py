"""The body of the scaling webhook (how many instances should serve) and its signature (pure).

The signature has Stripe's form: `t=SECONDS,v1=HEX`, where HEX is an HMAC-SHA256 of `SECONDS.BODY` with the shared
secret. Messages more than five minutes old are refused, because they may be replayed.
"""

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass
from typing import Self, cast

from ballast.common.errors import InvalidRequest, Unauthenticated

SIGNATURE = "Ballast-Signature"
_OLDEST_S = 300.0
_MOST = 1_000_000


@dataclass(frozen=True, slots=True)
class Wanted:
    """The number of instances that should serve, and the names of those that do. `parked`: names of instances that are
    parked or about to be; a scaler should end their processes first.
    """

    wanted: int
    serving: tuple[str, ...]
    parked: tuple[str, ...]
    reason: str = ""

    def differs(self, other: "Wanted | None") -> bool:
        """Whether anything but the reason differs."""
        return other is None or (self.wanted, self.serving, self.parked) != (other.wanted, other.serving, other.parked)

    def body(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Parse the body of a webhook call.

        Raises:
            InvalidRequest: the body has another form.
        """
        told = _parsed(body)
        wanted, names = told.get("wanted"), [told.get("serving"), told.get("parked")]
        if not isinstance(wanted, int) or not 0 <= wanted <= _MOST or not all(isinstance(one, list) for one in names):
            raise InvalidRequest("body", "is not what a planner sends: wanted, serving, parked")
        serving, parked = (tuple(map(str, cast("list[object]", one))) for one in names)
        return cls(wanted, serving, parked, str(told.get("reason", "")))


def _parsed(body: bytes) -> dict[str, object]:
    """The body's JSON object; empty if the body is not a JSON object."""
    try:
        told: object = json.loads(body)
    except ValueError:
        return {}
    return cast("dict[str, object]", told) if isinstance(told, dict) else {}


def sign(secret: bytes, body: bytes, at_s: float) -> str:
    """Signature of a body. `at_s`: wall-clock time of sending."""
    return f"t={int(at_s)},v1={_digest(secret, body, str(int(at_s)))}"


def verify(secret: bytes, body: bytes, signature: str, now_s: float) -> None:
    """Verify a signature.

    Raises:
        Unauthenticated: the signature is wrong, or its time differs from `now_s` by more than five minutes.
    """
    parts = dict(part.split("=", 1) for part in signature.split(",") if "=" in part)
    at, digest = parts.get("t", ""), parts.get("v1", "")
    if not hmac.compare_digest(_digest(secret, body, at).encode(), digest.encode()):
        raise Unauthenticated(f"{SIGNATURE} does not fit the body: another secret?")
    if not at.isdecimal() or abs(now_s - int(at)) > _OLDEST_S:
        raise Unauthenticated(f"{SIGNATURE} is of {at or 'no'} s, now is {now_s:.0f}: repeated, or clocks differ")


def _digest(secret: bytes, body: bytes, at: str) -> str:
    return hmac.new(secret, at.encode() + b"." + body, hashlib.sha256).hexdigest()
