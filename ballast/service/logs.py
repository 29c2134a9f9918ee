"""Structured logs: one event per line on stderr, ids as fields. Cores do not log; shells log their decisions.

Logging blocks a service for at most `_PATIENCE_S`: a line that cannot be written (full disk, closed pipe, stalled
reader) is dropped and counted. Lines contain no secrets, and tracebacks no values of variables, which may be prompts.
"""

import io
import logging
import os
import re
import select
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Literal, TextIO, cast

import structlog

from ballast.service.metrics import LOST_LOG_LINES
from ballast.service.redact import redact

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]

# Characters that are escaped, so that a client's id cannot forge log lines. ESC remains where it starts a colour code.
_UNPRINTABLE: Final = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]|\x1b(?!\[[0-9;]*m)")
_PIPE_BYTES = 4096  # a writable pipe accepts this many bytes without blocking (POSIX)
_PATIENCE_S = 0.05  # longest wait for a stalled reader
_REST_S = 1.0  # after a stall, lines are dropped without waiting for this long


class Sink(io.TextIOBase):
    """The stream of all log lines. Writing never raises, and blocks for at most `_PATIENCE_S`."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._impatient_until_s = 0.0
        try:
            self._fd = stream.fileno()
        except (OSError, ValueError, AttributeError):  # not a file: the stream is captured
            self._fd = None
        else:
            self._poll = select.poll()
            self._poll.register(self._fd, select.POLLOUT)

    def write(self, text: str, /) -> int:
        try:
            if self._fd is None:
                self._stream.write(text)
            elif not self._write(self._fd, text.encode("utf-8", "backslashreplace")):
                LOST_LOG_LINES.inc()
        except (OSError, ValueError):
            LOST_LOG_LINES.inc()
        return len(text)

    def flush(self) -> None:
        """Do nothing, because lines are written at once."""

    def _write(self, fd: int, data: bytes) -> bool:
        """Write as much as the reader takes in time. Returns True if everything was written."""
        ends_s = time.monotonic() + _PATIENCE_S
        while data:
            now_s = time.monotonic()
            left_s = max(0.0, ends_s - now_s) if now_s >= self._impatient_until_s else 0.0
            if not self._poll.poll(left_s * 1000):
                self._impatient_until_s = time.monotonic() + _REST_S
                return False
            data = data[os.write(fd, data[:_PIPE_BYTES]) :]
        return True


class _Renderer:
    """The last processor of structlog: renders an event as text without secrets and control characters."""

    def __init__(self, render: structlog.typing.Processor) -> None:
        self._render = render

    def __call__(self, logger: structlog.typing.WrappedLogger, name: str, event: structlog.typing.EventDict) -> str:
        said = event.get("event")
        try:
            line = str(self._render(logger, name, event))
        except Exception as error:  # noqa: BLE001 - a value whose repr fails must not stop the caller
            line = f"{name}: {said!s:.200} (cannot be shown: {type(error).__name__})"
        return _UNPRINTABLE.sub(_escaped, redact(line))


def _escaped(found: re.Match[str]) -> str:
    return f"\\x{ord(found[0]):02x}"


def configure(*, service: str, instance: str, level: LogLevel, form: LogFormat) -> None:
    """Set up logging for this process; `instance` identifies the replica of a service."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if form == "json":
        without_locals = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        shared.append(structlog.processors.ExceptionRenderer(without_locals))
        render: structlog.typing.Processor = structlog.processors.JSONRenderer()
    else:
        render = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    renderer = _Renderer(render)
    sink: Final = Sink(sys.stderr)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, sink)),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, instance=instance)
    # Libraries (grpc, redis) use the standard module `logging`; their warnings and errors go to the same stream.
    handler = logging.StreamHandler(sink)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


_is_silent: ContextVar[bool] = ContextVar("is_silent", default=False)
_NOWHERE: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
    structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL)
)


@contextmanager
def silence() -> Generator[None]:
    """Context manager that disables logging, for simulated services."""
    token = _is_silent.set(True)
    try:
        yield
    finally:
        _is_silent.reset(token)


def frames(error: BaseException) -> list[str]:
    """Stack frames of an error, innermost last, without its message, which may quote a client's request."""
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]


def raised_at(error: BaseException) -> tuple[str, int]:
    """(file, line) where an error was raised. Unlike `frames` it reads no source, because many
    calls may fail together.
    """
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return ("", 0) if tb is None else (tb.tb_frame.f_code.co_filename, tb.tb_lineno)


def get_logger() -> structlog.typing.FilteringBoundLogger:
    return _NOWHERE if _is_silent.get() else structlog.get_logger()
