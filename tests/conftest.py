"""Tests may be coroutines; those for a CUDA device are skipped without one; a busy machine fails no property.

`pytest --device cuda -m any_device` runs the tests of groups on a GPU, and `--device driver` on a CPU with the calls of
a GPU's driver: see `tests.support.group`.
"""

import asyncio
import inspect
import os
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "driver", "cuda"), default="cpu", help="where tests of groups compute")
    parser.addoption("--rotate", action="store_true", help="of the tests marked `rotating`, only this commit's share")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[DEVICE] = str(config.getoption("--device"))


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
