"""What a process has died of, by its nanny's log."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from nbelastic.cluster import dask_compat
from nbelastic.cluster.dask_compat import cause_of_death

MEMORY = (
    "distributed.nanny.memory - WARNING - Worker tcp://127.0.0.1:1 (pid={}) exceeded 95% memory "
    "budget. Restarting..."
)
TERMINATED = "distributed.nanny - INFO - Worker process {} was killed by signal 15"
CRASHED = "distributed.nanny - INFO - Worker process {} was killed by signal 11"
EXITED = "distributed.nanny - INFO - Worker process {} exited with status 3"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([TERMINATED.format(7)], "was killed by signal 15 (SIGTERM)"),
        ([CRASHED.format(7)], "was killed by signal 11 (SIGSEGV)"),
        ([EXITED.format(7)], "exited with status 3"),
        (
            [TERMINATED.format(7), MEMORY.format(7)],
            "was ended by its nanny, because it exceeded 95% of its memory limit",
        ),
        (
            [MEMORY.format(7), EXITED.format(7)],
            "was ended by its nanny, because it exceeded 95% of its memory limit",
        ),
        ([MEMORY.format(8), TERMINATED.format(7)], "was killed by signal 15 (SIGTERM)"),
        ([MEMORY.format(7)], ""),
        ([TERMINATED.format(8)], ""),
        ([], ""),
    ],
)
def test_the_cause_is_that_of_this_process(monkeypatch, lines, cause):
    async def get_logs(n):
        return [("INFO", line) for line in lines]

    monkeypatch.setattr(dask_compat, "LOG_INTERVAL_S", 0.0)
    scheduler = SimpleNamespace(rpc=lambda address: SimpleNamespace(get_logs=get_logs))
    assert asyncio.run(cause_of_death(scheduler, "tcp://nanny", 7)) == cause
