"""Read messages strictly, so that a malformed one closes no stream.

Dask closes a stream when its handler raises, and a worker closes with its stream. So a message is
read before it is handled. One of an agent that cannot be read costs the rank of that worker, and
nothing else.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

from nbelastic.cluster.wire import FROM_AGENTS, FROM_KERNELS, Message, RankEvent, unpack
from nbelastic.membership import (
    LoopDone,
    RankDied,
    RankExited,
    RankFormed,
    RankLeft,
    RankNote,
    RankRaised,
    RankReady,
    RankReturned,
    WeightsSampled,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Scheduler

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

FROM_RANKS = (
    LoopDone,
    RankDied,
    RankExited,
    RankRaised,
    RankFormed,
    RankLeft,
    RankNote,
    RankReady,
    RankReturned,
    WeightsSampled,
)
"""Events that a rank may report."""


class Intake:
    """Puts handlers on a scheduler that may raise.

    ``blame(worker, error)`` takes each message of a worker that cannot be read.
    """

    def __init__(self, scheduler: Scheduler, blame: Callable[[str, Exception], None]) -> None:
        self._blame = blame
        self._agents: dict[type[Message], Callable[[str, Any], None]] = {}
        self._kernels: dict[type[Message], Callable[[str, Any], None]] = {}
        scheduler.stream_handlers[FROM_AGENTS] = self._take_from_agent
        scheduler.stream_handlers[FROM_KERNELS] = self._take_from_kernel

    def of_agents(self, kind: type[M], handler: Callable[[str, M], None]) -> None:
        """Handle a message of agents by ``handler(worker, message)``."""
        self._agents[kind] = handler

    def of_kernels(self, kind: type[M], handler: Callable[[str, M], None]) -> None:
        """Handle a message of kernels by ``handler(client, message)``."""
        self._kernels[kind] = handler

    def _take_from_agent(self, worker: str, message: Any = None, **_: Any) -> None:
        try:
            read = unpack(message)
            if isinstance(read, RankEvent):
                _check(read)
            self._agents[type(read)](worker, read)
        except Exception as error:  # whatever is in the message
            logger.warning("a message from %s cannot be read", worker, exc_info=True)
            self._blame(worker, error)

    def _take_from_kernel(self, client: str, message: Any = None, **_: Any) -> None:
        try:
            read = unpack(message)
            self._kernels[type(read)](client, read)
        except Exception:  # whatever is in the message
            logger.exception("a message from the kernel %s cannot be read", client)


def _check(message: RankEvent) -> None:
    """Check that a rank may report an event, and that a return comes with its result."""
    event = message.event
    if not isinstance(event, FROM_RANKS):
        raise ValueError(f"a rank cannot report {type(event).__name__}")
    if isinstance(event, RankReturned) and message.result is None:
        raise ValueError("a rank that returns must send its result")
