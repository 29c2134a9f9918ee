"""Tests may be coroutines; those for a CUDA device are skipped without one; a busy machine fails no property.

`pytest --device cuda -m any_device` runs the tests of groups on a GPU, and `--device driver` on a CPU with the calls of
a GPU's driver: see `tests.support.group`.
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

# Before anybody imports grpc, and for all child processes: its notes about connections that end are no results.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# How long an example takes says more about the machine than about the property.
settings.register_profile("ballast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ballast")

pytest_plugins = ["tests.support.canaries"]


DEVICE = "BALLAST_TEST_DEVICE"  # in the environment, so that nobody imports torch to ask

_TEST_TAKES_AT_MOST_S = 250
_TIMEOUT_ENDS_IT_WITHIN_S = 120.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "driver", "cuda"), default="cpu", help="where tests of groups compute")
    parser.addoption("--rotate", action="store_true", help="of the tests marked `rotating`, only this commit's share")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[DEVICE] = str(config.getoption("--device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that its timeout cannot end prints where each thread is, and ends its process, so that it has failed: one
    that hangs within a library's call, or a property, whose timeout hypothesis takes for one more failing example.
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
    """A test that is a coroutine has an event loop of its own; one that hangs ends with the line at which it hangs.

    A fixture that is an asynchronous context manager is entered there, and the test gets what it gives.
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
    import torch  # only then: it takes a second

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
