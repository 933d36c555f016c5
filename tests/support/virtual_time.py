"""An event loop in which waiting takes no time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer when nothing else is to be done."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        loop: Any = self
        if not loop._ready and loop._scheduled:
            self._now = max(self._now, loop._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a loop of its own."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()
