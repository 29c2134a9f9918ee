"""Lifecycle of a service process: event loop, signals, exit statuses.

Exit statuses: 0 stopped on request, 2 invalid configuration, 70 broken invariant (a bug), 1 any other error.
"""

import asyncio
import contextlib
import faulthandler
import gc
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import uvloop

from ballast.common.errors import ConfigError, InvariantViolation
from ballast.rpc.failures import CallFailure
from ballast.service.logs import frames, get_logger, raised_at
from ballast.service.metrics import CALL_FAILURES, INVARIANT_VIOLATIONS
from ballast.service.redact import redact

E = TypeVar("E", bound=Exception)

_MAX_CAUSES = 256  # limit on distinct causes in the log; further failures are only counted


class Lifecycle:
    """Signals the main function of a service to stop, and receives reports of bugs and failed calls."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()  # set by SIGTERM, SIGINT or a bug: the main function drains, then returns
        self.bug: InvariantViolation | None = None
        self._logged: set[tuple[str, str, tuple[str, int]]] = set()  # causes of failed calls already logged

    def stop(self) -> None:
        self.stopping.set()

    def report_bug(self, bug: InvariantViolation) -> None:
        """Log the bug and stop the process with status 70. To be called only in the event loop's thread."""
        INVARIANT_VIOLATIONS.inc()
        get_logger().error("invariant violated", why=bug.why, story=list(bug.story))
        self.bug = self.bug or bug
        self.stopping.set()

    def report_failure(self, failure: CallFailure) -> None:
        """Count an unexpected failure of a call, and log it if its cause is new. The service continues."""
        CALL_FAILURES.labels(failure.method, failure.cause).inc()
        key = (failure.method, failure.cause, raised_at(failure.error))
        if key in self._logged or len(self._logged) >= _MAX_CAUSES:
            return
        self._logged.add(key)
        log = get_logger().bind(method=failure.method, cause=failure.cause)
        if failure.is_ours:
            log.error("call failed", at=frames(failure.error))
        else:
            log.warning("call failed")


def advertised_address(host: str, advertise_host: str | None, port: int) -> str:
    """host:port at which other processes reach a server that listens on `host`. `advertise_host` overrides the host."""
    everywhere = host in ("0.0.0.0", "::", "[::]", "")
    return f"{advertise_host or (socket.gethostname() if everywhere else host)}:{port}"


def say_ready(service: str, instance: str, address: str) -> None:
    """Print the ready message, one line on stdout for the parent process, and exclude existing objects from garbage
    collection.
    """
    gc.collect()
    gc.freeze()  # otherwise collections would scan all imported objects, which takes most of an idle worker's time
    print(f"ready service={service} id={instance} address={address}", flush=True)


def run_service(main: Callable[[Lifecycle], Awaitable[None]]) -> None:
    """Run `main` until it returns, then exit the process. The first SIGTERM or SIGINT sets `Lifecycle.stopping`; a
    second one ends the process at once.
    """
    faulthandler.enable()
    _open_all_files()
    sys.exit(uvloop.run(_supervise(main)))


def _open_all_files() -> None:
    """Raise the limit on open files to its maximum; by default it is 1,024, for programs that use `select`."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and now < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _supervise(main: Callable[[Lifecycle], Awaitable[None]]) -> int:
    life = Lifecycle()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        life.stop()
        loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    misconfigured = False
    try:
        await main(life)
    except* ConfigError as group:
        misconfigured = True
        for error in _leaves(group):
            print(redact(f"configuration error: {error}"), file=sys.stderr)
    except* InvariantViolation as group:
        for error in _leaves(group):
            life.report_bug(error)
    if life.bug is not None:
        return 70
    return 2 if misconfigured else 0


def _leaves(group: BaseExceptionGroup[E]) -> Iterator[E]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
