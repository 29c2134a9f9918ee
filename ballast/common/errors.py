"""The errors of this project, one class per cause.

Expected failures inside a core are values (commands such as `Refuse`); these classes are for failures that cross a call
or the network. `ballast.rpc.errors` maps each class to a gRPC status and back, so that a caller in another process
catches the same class that was raised. Only `InvariantViolation` changes: it stops the process that raised it, and its
callers get a `PeerViolation`.
"""

from collections.abc import Sequence


class BallastError(Exception):
    """Root of all errors raised on purpose."""


class InvalidRequest(BallastError):
    """The client's request is invalid; a retry has the same result."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why


class Unauthenticated(BallastError):
    """The caller is not authenticated: a token or certificate is missing or invalid."""


class PermissionDenied(BallastError):
    """The caller is not permitted to make this call."""


class AlreadyExists(BallastError):
    """A request with this id is already in progress."""


class NotFound(BallastError):
    """The request, worker or model does not exist."""


class Overloaded(BallastError):
    """A limit was reached. Retry after `retry_after_s`."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(why)
        self.why = why
        self.retry_after_s = retry_after_s


class Unavailable(BallastError):
    """The target cannot be reached or is draining. Retry elsewhere with the same request id.

    `gone`: the target was serving the request and has died or is shutting down; another one can continue the request.
    """

    def __init__(self, target: str, why: str = "not reachable", *, gone: bool = False) -> None:
        super().__init__(f"{target}: {why}")
        self.target = target
        self.why = why
        self.gone = gone


class DeadlineExceeded(BallastError):
    """The caller's deadline has passed."""


class Cancelled(BallastError):
    """The caller has cancelled the request."""


class StaleEpoch(BallastError):
    """A message from an older layout, attempt or incarnation. Refresh, then retry."""

    def __init__(self, what: str, have: int, want: int) -> None:
        super().__init__(f"{what}: message carries {have}, current is {want}")
        self.what = what
        self.have = have
        self.want = want


class NotPossible(BallastError):
    """The call is not possible in the cluster's current state. Check `ballast status` before trying again."""


class NotActive(BallastError):
    """A standby received a call for the active replica. Find the active one, then retry there."""

    def __init__(self, who: str) -> None:
        super().__init__(f"{who} is a standby, not the active one")
        self.who = who


class PeerViolation(BallastError):
    """The peer violated the protocol."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"{peer}: {why}")
        self.peer = peer
        self.why = why


class CallFailed(BallastError):
    """An unexpected error in a call. The service continues; its log and metrics have the cause."""


class ConfigError(BallastError):
    """The configuration is wrong: `path` names the setting, file or tensor, `why` what is wrong with it."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


class InvariantViolation(BallastError):
    """A bug: an invariant does not hold. The process stops (exit status 70); `story` is the history of the object."""

    def __init__(self, why: str, story: Sequence[str] = ()) -> None:
        super().__init__(why if not story else why + "\n  " + "\n  ".join(story))
        self.why = why
        self.story = tuple(story)


def broken_core(error: Exception) -> InvariantViolation:
    """Wrap an unexpected exception that a core raised, because the core's state may be inconsistent afterwards."""
    return InvariantViolation(f"a core failed while handling an event: {type(error).__name__}: {error}")
