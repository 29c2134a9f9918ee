"""Exit statuses and signals of a service process."""

import signal
import subprocess
import sys

import pytest

from ballast.service.lifecycle import advertised_address

_PROGRAM = """
import asyncio
from ballast.common.errors import ConfigError, InvariantViolation
from ballast.service import logs
from ballast.service.lifecycle import Lifecycle, run_service, say_ready

async def main(life: Lifecycle) -> None:
    logs.configure(service="worker", instance="w1", level="info", form="json")
{body}

run_service(main)
"""


def start(*body: str) -> "subprocess.Popen[str]":
    program = _PROGRAM.format(body="\n".join(f"    {line}" for line in body))
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (["return"], 0, ""),
        (["raise ConfigError('worker.port', 'is taken')"], 2, "configuration error: worker.port: is taken"),
        (["raise InvariantViolation('blocks leak', ['first', 'then'])"], 70, "blocks leak"),
        (["life.report_bug(InvariantViolation('seen elsewhere'))", "await life.stopping.wait()"], 70, "seen elsewhere"),
        (["raise ZeroDivisionError('oops')"], 1, "ZeroDivisionError: oops"),
        (
            [
                "async def fail(): raise ConfigError('inside', 'a group')",
                "async with asyncio.TaskGroup() as tasks: tasks.create_task(fail())",
            ],
            2,
            "configuration error: inside: a group",
        ),
    ],
)
def test_exit_statuses(body: list[str], status: int, says: str) -> None:
    code, errors = end(start(*body))
    assert code == status, errors
    assert says in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_in_order(number: signal.Signals) -> None:
    process = start("say_ready('worker', 'w1', 'host:1')", "await life.stopping.wait()")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready service=worker id=w1 address=host:1\n"
    process.send_signal(number)
    assert end(process)[0] == 0


def test_a_second_signal_kills() -> None:
    process = start(
        "say_ready('worker', 'w1', 'host:1')",
        "await life.stopping.wait()",
        "print('draining', flush=True)",
        "await asyncio.sleep(60)",
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "draining\n"
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == -signal.SIGTERM


def test_the_advertised_address() -> None:
    assert advertised_address("127.0.0.1", None, 5) == "127.0.0.1:5"
    assert advertised_address("0.0.0.0", "worker-3", 5) == "worker-3:5"
    host, port = advertised_address("0.0.0.0", None, 5).rsplit(":", 1)
    assert host not in ("", "0.0.0.0")
    assert port == "5"
