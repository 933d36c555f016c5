"""Ranks' processes without Dask, launched by an event loop of this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import cloudpickle
import psutil
import pytest

from nbelastic.cluster.payload import Modules
from nbelastic.cluster.worker.rank.channel import RankSetup
from nbelastic.cluster.worker.rank_process import ProcessExit, RankLauncher, RankProcess
from nbelastic.elastic.ranks.runtime import RankSpec
from nbelastic.messages import (
    JobPayload,
    Message,
    Place,
    RankEvent,
    RankLeft,
    RankRaised,
    RankReturned,
)
from nbelastic.pickling import dumps

PATIENCE_S = 60.0


def setup_of(function: Callable[..., Any], *args: Any) -> RankSetup:
    """Return what a rank gets that calls a function; the function travels by value."""
    payload = JobPayload(b"", pickle.dumps(Modules()), dumps((function, args, {})))
    return RankSetup(
        RankSpec(job="job", start=0, place=Place(0, 1, 0, 1, 0, 1), bind="127.0.0.1"),
        payload,
        environment=dict(os.environ),
        directory=os.getcwd(),
        path=tuple(sys.path),
        threads=1,
        scheduler="tcp://127.0.0.1:9",
        security=None,
        dask_config=b"",
    )


class Launched:
    """A rank, and all that comes of it, in order: messages, and what it has printed as bytes."""

    def __init__(self, launcher: RankLauncher, function: Callable[..., Any], *args: Any) -> None:
        self.came: list[Message | bytes] = []
        setup, take = setup_of(function, *args), self.came.append
        self.process = RankProcess(setup, take, take, bool)
        launcher.launch(self.process)

    async def end(self) -> ProcessExit:
        return await asyncio.wait_for(self.process.wait(), PATIENCE_S)

    @property
    def output(self) -> str:
        return b"".join(each for each in self.came if isinstance(each, bytes)).decode()

    @property
    def last(self) -> Any:
        """The event that says how the function has ended; None if there is none."""
        events = [each for each in self.came if isinstance(each, RankEvent)]
        ends = [e for e in events if isinstance(e.event, (RankReturned, RankRaised, RankLeft))]
        return ends[-1] if ends else None

    @property
    def result(self) -> Any:
        assert self.last is not None, self.output
        assert self.last.result is not None, (self.last.event, self.output)
        return cloudpickle.loads(self.last.result)

    @property
    def pids(self) -> list[int]:
        """The processes that it has named: ``pids 17 18 end``."""
        return [int(each) for each in self.output.partition("pids ")[2].split(" end")[0].split()]

    async def printed(self, text: str) -> None:
        """Wait until it has printed a text."""
        await until(lambda: text in self.output)


async def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.01)


class Host:
    """An event loop that launches ranks as a worker does, for tests that are no coroutines."""

    @classmethod
    @contextlib.contextmanager
    def alone(cls, name: str = "") -> Iterator[Host]:
        """Make a host; with a name, one whose template no other test has."""
        with pytest.MonkeyPatch.context() as patch:
            if name:  # of a variable that a template reads at import
                patch.setenv("NBELASTIC_TEST", f"{name}-{os.getpid()}")
            with contextlib.closing(cls()) as made:
                yield made

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.launcher = self.do(self._launcher())

    async def _launcher(self) -> RankLauncher:
        launcher = RankLauncher()
        launcher.start()
        return launcher

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def launch(self, function: Callable[..., Any], *args: Any) -> Launched:
        async def made() -> Launched:
            return Launched(self.launcher, function, *args)

        launched: Launched = self.do(made())
        return launched

    def run(self, function: Callable[..., Any], *args: Any) -> tuple[Launched, ProcessExit]:
        """Run a function as a rank; return the rank, and how its process has ended."""
        launched = self.launch(function, *args)
        return launched, self.do(launched.end())

    def close(self) -> None:
        self.do(self.launcher.close())
        self.do(asyncio.sleep(0.05))  # transports are closed in the loop's next turns
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


def is_there(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
