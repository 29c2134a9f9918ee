"""Runs coroutine tests, skips CUDA tests without a device, and disables hypothesis deadlines.

`pytest --device cuda -m any_device` runs the tests of groups on a GPU; `--device driver` runs them on a CPU through a
fake GPU driver, see `tests.support.group`.
"""

import asyncio
import faulthandler
import inspect
import os
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

from tests.support import rotation

# Set before grpc is imported, and for all child processes: gRPC's notices about closed connections are noise.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# The duration of an example depends on the machine more than on the property.
settings.register_profile("ballast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ballast")

pytest_plugins = ["tests.support.canaries"]


DEVICE = "BALLAST_TEST_DEVICE"  # an environment variable, so that it can be read without importing torch

_TEST_TAKES_AT_MOST_S = 250
_TIMEOUT_ENDS_IT_WITHIN_S = 120.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "driver", "cuda"), default="cpu", help="device for tests of groups")
    parser.addoption("--rotate", action="store_true", help="run this commit's share of rotating tests")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[DEVICE] = str(config.getoption("--device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fails a test that its timeout cannot end: prints the stack of each thread and ends the process. A test may hang
    in a library call, and hypothesis may treat the timeout as one more failing example.
    """
    mark, given = item.get_closest_marker("timeout"), item.config.getoption("timeout")
    given = item.config.getini("timeout") if given is None else given
    takes_at_most_s = float(given if mark is None else mark.args[0])
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(takes_at_most_s + _TIMEOUT_ENDS_IT_WITHIN_S, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test in its own event loop, with a time limit; a test that hangs fails with the line at which it
    hangs.

    A fixture that is an asynchronous context manager is entered in that loop, and the test gets the entered value.
    """
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None

    async def bounded() -> None:
        async with asyncio.timeout(_TEST_TAKES_AT_MOST_S), AsyncExitStack() as stack:
            values = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
            for name, value in values.items():
                if isinstance(value, AbstractAsyncContextManager):
                    values[name] = await stack.enter_async_context(value)
            await test(**values)

    asyncio.run(bounded())
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--rotate") and (others := rotation.of_other_commits(items)):
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]
    marks = ("gpu", "any_device") if os.environ[DEVICE] == "cuda" else ("gpu",)
    marked = [item for item in items if any(map(item.get_closest_marker, marks))]
    if not marked:
        return
    import torch  # imported here, since it takes a second

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
