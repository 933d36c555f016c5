"""Install agents on workers, once each."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING

from nbelastic.cluster.wire import PLUGIN
from nbelastic.cluster.worker.agent import Agent

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Scheduler

HELLO_TIMEOUT = 10.0
"""Seconds that a worker may take for its hello once it has its agent."""


class AgentInstaller:
    """Puts agents on workers; ``refuse(address, reason)`` takes each failure."""

    def __init__(self, scheduler: Scheduler, refuse: Callable[[str, str], None]) -> None:
        self._scheduler = scheduler
        self._refuse = refuse
        self._under_way: dict[str, asyncio.Event] = {}

    def arrived(self, address: str) -> None:
        """Note the hello of an agent."""
        if address in self._under_way:
            self._under_way[address].set()

    def installs(self, address: str) -> bool:
        """Return whether an agent is being put on a worker."""
        return address in self._under_way

    async def install(self, address: str) -> None:
        """Put an agent on a worker and wait for its hello."""
        if address in self._under_way:
            await self._under_way[address].wait()
            return
        here = self._under_way[address] = asyncio.Event()
        try:
            message = {"op": "plugin-add", "plugin": pickle.dumps(Agent()), "name": PLUGIN}
            answers = await asyncio.wait_for(
                self._scheduler.broadcast(msg=message, workers=[address], on_error="return"),
                HELLO_TIMEOUT,
            )
            answer = answers.get(address)
            if not isinstance(answer, dict) or answer.get("status") != "OK":
                problem = answer.get("text") if isinstance(answer, dict) else repr(answer)
                self._refuse(address, f"it cannot load nbelastic: {problem}")
            else:
                await asyncio.wait_for(here.wait(), HELLO_TIMEOUT)
        except (OSError, asyncio.TimeoutError) as error:
            self._refuse(address, f"it did not answer: {error!r}")
        finally:
            self._under_way.pop(address).set()
