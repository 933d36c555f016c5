"""An event loop in which waiting takes no time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer when nothing else is to be done."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        loop: Any = self
        if not loop._ready and loop._scheduled:
            self.now = max(self.now, loop._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a loop of its own, and cancel what it has left."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_alone(coroutine))
    finally:
        loop.close()


async def _alone(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    finally:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
