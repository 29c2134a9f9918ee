"""Logging never raises, and never shows secrets or clients' text."""

import asyncio
import os
import subprocess
import sys

import pytest

from ballast.common.errors import ConfigError, Unavailable
from ballast.service.redact import redact
from ballast.service.state import StateServer

_PREAMBLE = """
import logging, os, sys, time
from ballast.service import logs
from ballast.service.metrics import LOST_LOG_LINES
{before}
logs.configure(service="worker", instance="w1", level="debug", form={form!r})
log = logs.get_logger()
def lost(): return int(LOST_LOG_LINES._value.get())
{body}
"""
FORMS = ["console", "json"]
SECRET, PROMPT = "hunter2-canary", "my-diary-canary"


def run(form: str, body: str, before: str = "", stderr: int = subprocess.PIPE) -> tuple[str, str]:
    """Run the program; return its stdout and stderr. It must exit with status 0."""
    program = _PREAMBLE.format(form=form, body=body, before=before)
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr or ""


_SAY = """
log.info("a line"); log.error("another", why="x" * 100_000)
logging.getLogger("grpc").warning("from a library")
print(lost())
"""


@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_loses_only_log_lines(form: str) -> None:
    said, _ = run(form, _SAY, before='sys.stderr = open("/dev/full", "w")')
    assert said == "3\n"


@pytest.mark.parametrize("form", FORMS)
def test_a_closed_pipe_loses_only_log_lines(form: str) -> None:
    said, _ = run(form, _SAY, before='r, w = os.pipe(); os.close(r); sys.stderr = os.fdopen(w, "w")')
    assert said == "3\n"


@pytest.mark.parametrize("form", FORMS)
def test_a_stalled_log_reader_delays_nothing(form: str) -> None:
    body = """
began = time.monotonic()
for _ in range(2000): log.info("a line", more="x" * 200)
print(lost() > 1000, time.monotonic() - began < 10)
"""
    reader, writer = os.pipe()
    try:
        said, _ = run(form, body, stderr=writer)
    finally:
        os.close(reader)
        os.close(writer)
    assert said == "True True\n"


@pytest.mark.parametrize("form", FORMS)
def test_an_unprintable_value_crashes_no_process(form: str) -> None:
    body = """
class Bad:
    def __repr__(self): raise KeyError("no")
    __str__ = __repr__
log.info("strange", value=Bad())
log.info("surrogate \\ud800")
print(lost())
"""
    said, logged = run(form, body)
    assert said == "0\n"
    assert "strange" in logged


@pytest.mark.parametrize("form", FORMS)
def test_no_line_contains_terminal_control_characters(form: str) -> None:
    _, logged = run(form, 'log.info("request", request_id="a\\x00b\\x1b]0;title\\x07c\\x7f")')
    assert not set(logged) & set("\x00\x1b\x07\x7f")


@pytest.mark.parametrize("form", FORMS)
def test_no_traceback_shows_the_values_of_variables(form: str) -> None:
    body = f"""
import asyncio
from ballast.rpc.failures import CallFailure
from ballast.service.lifecycle import Lifecycle
def serve(prompt):
    {{}}[len(prompt)]
def caught(say):
    prompt = "{PROMPT}"
    try: serve(prompt)
    except KeyError as error: say(error)
caught(lambda error: log.exception("failed"))
caught(lambda error: log.error("failed", exc_info=error))
caught(lambda error: logging.getLogger("asyncio").error("failed", exc_info=error))
async def main():
    life = Lifecycle()
    try: raise ValueError("{PROMPT}")
    except ValueError as error: life.report_failure(CallFailure("/m", "ValueError", error))
    life.report_failure(CallFailure("/m", "malformed", ValueError("{PROMPT}")))
asyncio.run(main())
"""
    _, logged = run(form, body)
    assert logged.count("KeyError") >= 3
    assert "in serve" in logged or '"name": "serve"' in logged
    assert PROMPT not in logged.replace(f'prompt = "{PROMPT}"', "")  # tracebacks show source lines


@pytest.mark.parametrize("form", FORMS)
def test_no_line_shows_a_secret(form: str) -> None:
    body = f"""
url = "redis://app:{SECRET}@10.0.0.1:6379/0"
log.info("starting", settings={{"redis_url": url, "nested": [url]}})
log.info("auth", header="Bearer {SECRET}")
try: raise OSError(f"{{url}} cannot be reached")
except OSError: log.exception("failed")
logging.getLogger("redis").warning("retrying %s", url)
"""
    _, logged = run(form, body)
    assert logged.count("redis://***@10.0.0.1:6379/0") == 4
    assert SECRET not in logged


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:pw@h:1/0", "redis://***@h:1/0"),
        ("redis://u:p@ss@h:1/0 and rediss://u:pw@h", "redis://***@h:1/0 and rediss://***@h"),
        ("redis://:p/w@h", "redis://***@h"),
        ("unix:///run/s.sock?password=pw&db=1", "unix:///run/s.sock?password=***&db=1"),
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("authorization: bearer abc.def", "authorization: bearer ***"),
        ("mail a@b.c", "mail a@b.c"),
    ],
)
def test_secrets_are_recognised(text: str, shown: str) -> None:
    assert redact(text) == shown


async def _ask(url: str) -> str:
    state = StateServer(url)
    try:
        with pytest.raises(Unavailable) as caught:
            await state.next_incarnation("worker", "w")
        return str(caught.value)
    finally:
        await state.close()


def test_no_error_shows_the_state_servers_password() -> None:
    said = asyncio.run(_ask(f"redis://app:{SECRET}@127.0.0.1:1/0"))
    assert "redis://***@127.0.0.1:1/0" in said
    assert SECRET not in said
    with pytest.raises(ConfigError) as caught:
        StateServer(f"http://app:{SECRET}@127.0.0.1/0")
    assert SECRET not in str(caught.value)
