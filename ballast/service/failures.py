"""HTTP failures in OpenAI's format: a status and a body."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ballast.rpc.errors import cut


@dataclass(frozen=True, slots=True)
class Failure(Exception):
    """A refusal or an error, as returned to a client.

    Attributes:
        status: HTTP status.
        kind: OpenAI's `type` of the error.
        code: Identifies the cause for programs.
        message: For people: what was wrong, where, and what to do.
        param: The invalid field of the request.
        headers: Additional headers.
    """

    status: int
    kind: str
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def body(self) -> dict[str, object]:
        return {"error": {"message": cut(self.message), "type": self.kind, "param": self.param, "code": self.code}}


def invalid(param: str | None, why: str, *, code: str = "invalid_value", status: int = 400) -> Failure:
    """A failure caused by the request."""
    message = f"{param}: {why}" if param else why
    return Failure(status, "invalid_request_error", code, message, param)
