"""Tests that are coroutines."""

import asyncio
import inspect


def pytest_pyfunc_call(pyfuncitem):
    """Run a coroutine; in virtual time where its module has :func:`tests.support.virtual_time.run`.

    It is called by pytest for each test.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    values = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run = getattr(pyfuncitem.module, "run", asyncio.run)
    run(pyfuncitem.obj(**values))
    return True
