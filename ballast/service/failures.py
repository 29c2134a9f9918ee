"""HTTP failures in OpenAI's format: a status and a body."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ballast.rpc.errors import cut


@dataclass(frozen=True, slots=True)
class Failure(Exception):
    """An error response to a client, raised by handlers.

    Attributes:
        status: HTTP status.
        kind: OpenAI's `type` of the error.
        code: OpenAI's `code`: the cause, for programs.
        message: The human-readable cause: what was wrong, where, and what to do.
        param: The invalid field of the request, if any.
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
    """A failure for an invalid request; `why` is prefixed with the name of the field, if given."""
    message = f"{param}: {why}" if param else why
    return Failure(status, "invalid_request_error", code, message, param)
