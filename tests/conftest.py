"""Tests may be coroutines; those marked `gpu` are skipped without a CUDA device; a busy machine fails no property."""

import asyncio
import inspect
import os
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest
from hypothesis import HealthCheck, settings

# Before anybody imports grpc, and for all child processes: its notes about connections that end are no results.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# How long an example takes says more about the machine than about the property.
settings.register_profile("ballast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ballast")

pytest_plugins = ["tests.support.canaries"]


_TEST_TAKES_AT_MOST_S = 250


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only then: it takes a second

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
