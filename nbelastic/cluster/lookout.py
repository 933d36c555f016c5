"""Asking those who can see a worker's process what they see."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialize, Serialized, deserialize

from .look import Sight, Suspicion, look

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distributed import Scheduler

    from .records import Host

__all__ = ["Lookout"]

PAUSE = 5.0
"""Seconds for which somebody is not asked again who could not be asked."""


class Lookout:
    """Has processes looked at, by their nannies or by other workers of their hosts.

    Both have a handler that runs a function, so nothing needs to be installed there. Nobody here
    waits for an answer, and nobody is asked about a process while an answer of theirs on it is
    due: one that is stopped too leaves no more than one question open.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        Whose workers.
    hosts : dict
        The plugin's book.
    found : callable
        ``found(slot, verdict)`` hears what :meth:`.Suspicion.judge` makes of the looks.
    """

    def __init__(
        self, scheduler: Scheduler, hosts: dict[str, Host], found: Callable[[str, str], None]
    ) -> None:
        self._scheduler = scheduler
        self._hosts = hosts
        self._found = found
        self._questions: set[asyncio.Task[None]] = set()

    def acquaint(self, slot: str) -> None:
        """Have a worker's nanny look once in good time: the first look takes it some imports."""
        host = self._hosts[slot]
        state = self._scheduler.workers.get(host.slot["worker"])
        if state is not None and state.nanny:
            self._send(host, Suspicion(), (host.slot["worker"], True))

    def look_at(self, slot: str) -> None:
        """Have somebody look at a worker's process, soon."""
        host = self._hosts[slot]
        if host.suspicion is None:
            host.suspicion = Suspicion()
        free = (who for who in self._watchers(host) if who not in host.asked)
        watcher = next(free, None)
        if watcher is not None:
            self._send(host, host.suspicion, watcher)

    def _send(self, host: Host, suspicion: Suspicion, watcher: tuple[str, bool]) -> None:
        host.asked.add(watcher)
        task = asyncio.ensure_future(self._ask(host, suspicion, *watcher))
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    def stop(self) -> None:
        """Wait for no more answers."""
        for task in self._questions:
            task.cancel()

    def _watchers(self, host: Host) -> Iterator[tuple[str, bool]]:
        """Yield who may see a worker's process: its nanny, then others on its host that are heard.

        Each is the address of a worker, and whether its nanny is meant.
        """
        own = host.slot["worker"]
        state = self._scheduler.workers.get(own)
        if state is not None and state.nanny:
            yield own, True
        place = (host.slot["host"], host.process["namespace"])
        for other in self._hosts.values():
            there = (other.slot["host"], other.process["namespace"])
            if other is not host and there == place and other.suspicion is None:
                yield other.slot["worker"], False

    async def _ask(self, host: Host, suspicion: Suspicion, address: str, nanny: bool) -> None:
        message = {"op": "run", "function": dumps(look), "args": dumps((host.process,))}
        try:
            if address not in self._scheduler.workers:
                return
            answers = await self._scheduler.broadcast(
                msg=message, workers=[address], nanny=nanny, on_error="return"
            )
            sight = _sight(answers.get(address))
            if sight is None:
                await asyncio.sleep(PAUSE)
            elif host.suspicion is suspicion:  # else it has been heard of since
                verdict = suspicion.judge(sight)
                if verdict:
                    self._found(host.slot["id"], verdict)
        finally:
            host.asked.discard((address, nanny))


def _sight(answer: Any) -> Sight | None:
    """Return the sight in the answer of a ``run`` handler, None if there is none in it."""
    if not isinstance(answer, dict) or answer.get("status") != "OK":
        return None
    result = answer.get("result")
    if isinstance(result, Serialized):  # as the scheduler leaves what it only passes on
        result = deserialize(result.header, result.frames)
    elif isinstance(result, Serialize):  # came without being written down
        result = result.data
    return result if isinstance(result, Sight) else None
