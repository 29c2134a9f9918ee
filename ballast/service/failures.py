"""HTTP failures in OpenAI's form: a status and a body."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ballast.rpc.errors import cut


@dataclass(frozen=True, slots=True)
class Failure(Exception):
    """A refusal or an error, as a client gets it.

    Attributes:
        status: Of HTTP.
        kind: OpenAI's `type` of the error.
        code: A word that programs can tell causes apart by.
        message: For people: what was wrong, where, and what to do.
        param: The field of the request at fault.
        headers: Beyond those of every answer.
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
    """The request is at fault."""
    message = f"{param}: {why}" if param else why
    return Failure(status, "invalid_request_error", code, message, param)
