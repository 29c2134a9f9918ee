"""Every failure this project can name, one class per cause.

Expected failures inside a core are values (commands such as `Refuse`); these classes are for the edges, where a
failure has to cross a call or the wire. `ballast.rpc.errors` maps each class to a gRPC status and back, so that a
caller in another process catches the same class that was raised. A broken invariant alone changes on its way: it stops
the process in which it was found, and for all others it is a `PeerViolation`.
"""

from collections.abc import Sequence


class BallastError(Exception):
    """Root of all errors raised on purpose."""


class InvalidRequest(BallastError):
    """The client's mistake. Fix the request; a retry gives the same answer."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why


class Unauthenticated(BallastError):
    """The caller is not authenticated: a token or certificate is missing or invalid."""


class PermissionDenied(BallastError):
    """The caller lacks a right."""


class AlreadyExists(BallastError):
    """A request with this id is being served already."""


class NotFound(BallastError):
    """What was named (a request, a worker, a model) is not here."""


class Overloaded(BallastError):
    """A bound was reached. Back off for `retry_after_s` and try again."""

    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__(why)
        self.why = why
        self.retry_after_s = retry_after_s


class Unavailable(BallastError):
    """The target cannot be reached or is draining. Retry elsewhere, with the same request id.

    `gone`: it was serving the request and has died or is shutting down, so that another one can go on with it.
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
    """A message of an older layout, attempt or incarnation. Refresh, then retry."""

    def __init__(self, what: str, have: int, want: int) -> None:
        super().__init__(f"{what}: message carries {have}, current is {want}")
        self.what = what
        self.have = have
        self.want = want


class NotPossible(BallastError):
    """The request does not fit the present state. Look (`ballast status`), then decide anew."""


class NotActive(BallastError):
    """A standby was called for what only the active replica does. Find the active one, then retry there."""

    def __init__(self, who: str) -> None:
        super().__init__(f"{who} is a standby, not the active one")
        self.who = who


class PeerViolation(BallastError):
    """The other side broke the protocol."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"{peer}: {why}")
        self.peer = peer
        self.why = why


class CallFailed(BallastError):
    """An unexpected error in a call. The service goes on; its log and metrics have the cause."""


class ConfigError(BallastError):
    """The operator's mistake: `path` names the setting, file or tensor, `why` says what is wrong with it."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


class InvariantViolation(BallastError):
    """A bug. The process stops (exit status 70) and logs the history of the object concerned."""

    def __init__(self, why: str, story: Sequence[str] = ()) -> None:
        super().__init__(why if not story else why + "\n  " + "\n  ".join(story))
        self.why = why
        self.story = tuple(story)


def broken_core(error: Exception) -> InvariantViolation:
    """Wraps an unexpected exception inside of a core, whose state is then inconsistent."""
    return InvariantViolation(f"a core failed amid a decision: {type(error).__name__}: {error}")
