"""Choosing, all ranks together, how tensors are to travel.

1. All bring a *card* to the store: where this rank is, and whether it can share memory.
2. Where a host has several ranks, they form a segment (:mod:`nbelastic.collectives.host`).
3. All bring a *verdict* to the store: nothing if that went well, else why not.

Everybody draws the same conclusion from the same cards and verdicts: shared memory if all are on
one host; both where some are; else, and wherever something is in the way, Gloo. A job that demands
shared memory fails instead, with the reason.

The rank's thread does all that. An abort, from any thread, raises the alarm, which frees it
wherever it waits; the communicator that is chosen shares the alarm.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from nbelastic.collectives.alarm import Alarm
from nbelastic.collectives.cards import Card, Layout, this_host, why_not
from nbelastic.collectives.communicator import Communicator, Rendezvous
from nbelastic.collectives.forwarding import ForwardingCommunicator
from nbelastic.collectives.gloo import GlooCommunicator
from nbelastic.collectives.hierarchical import HierarchicalCommunicator
from nbelastic.collectives.host import FORMING_LIMIT_S, Door, NotFormed
from nbelastic.collectives.visit import Visit
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.collectives.host import Share

__all__ = ["Chooser"]

logger = logging.getLogger(__name__)

_said: set[str] = set()


class Chooser(ForwardingCommunicator):
    """What chooses a communicator when it is connected; until then, and after, it stands for it.

    Parameters
    ----------
    rendezvous : Rendezvous
        Which ranks, where they meet, and what they want (``backend``).
    host : str, optional
        Where this rank says that it is, if not what it finds.
    """

    name = "auto"

    def __init__(self, rendezvous: Rendezvous, host: str | None = None) -> None:
        self.rank = rendezvous.rank
        self.size = rendezvous.size
        self.generation = rendezvous.generation
        self._rendezvous = rendezvous
        self._host = host
        self._alarm = Alarm()
        self._begun = False
        self._chosen: Communicator | None = None

    def connect(self) -> Communicator:
        """Choose with the other ranks, and return what was chosen, connected."""
        self._alarm.check()
        if self._begun:
            raise RuntimeError("connect() is called once")
        self._begun = True
        try:
            chosen = self._choose()
        except CollectiveError as error:
            self._alarm.raise_(f"generation {self.generation} did not form: {error}")
            self._alarm.check()
            raise  # never: the alarm has been raised
        self._chosen = chosen
        self._alarm.check()  # what was chosen is closed with this
        return chosen

    # -- choosing --------------------------------------------------------------------------------

    def _choose(self) -> Communicator:
        trouble = why_not()
        if trouble:
            return self._choose_through(None, trouble)
        try:
            door = Door(self._rendezvous)
        except OSError as error:
            return self._choose_through(None, f"no socket for the others of its host: {error}")
        self._alarm.then(lambda *_: door.shut())
        with door:
            return self._choose_through(door, "")

    def _choose_through(self, door: Door | None, trouble: str) -> Communicator:
        card = Card(trouble, self._host or this_host(), door.name if door else "")
        brought = self._exchange("cards", card.encode())
        cards = [Card.decode(value, rank) for rank, value in enumerate(brought)]
        layout = Layout.of(cards)
        if not layout.crowded:
            return self._over_gloo()
        if layout.trouble:
            logged = logging.INFO  # it is known beforehand, and the same for every generation
            return self._step_aside(layout.trouble, logged)
        with contextlib.ExitStack() as stack:
            share, trouble = None, ""
            if door is not None:  # else it is alone on its host
                try:
                    share = _form(door, layout.neighbours(self.rank), self.rank, cards)
                except NotFormed as error:
                    trouble = str(error)
                door.close()  # nobody needs to wait at it any more
            if share is not None:
                stack.callback(share.drop)
            # Others may still be forming, as long as they are allowed to.
            verdicts = self._exchange("verdicts", trouble.encode(), 2 * FORMING_LIMIT_S)
            for rank, verdict in enumerate(verdicts):
                if verdict:
                    stack.close()
                    return self._step_aside(f"rank {rank}: {verdict.decode()}", logging.WARNING)
            if share is not None:
                share.watch()
            stack.pop_all()
            return self._over_segments(layout, share)

    def _over_segments(self, layout: Layout, share: Share | None) -> Communicator:
        """Return the communicator for that layout; the segment is its own."""
        group = None if share is None else share.group
        if group is not None and len(layout.hosts) == 1:
            from nbelastic.collectives.shared import SharedMemoryCommunicator

            return SharedMemoryCommunicator(self._rendezvous, group, self._alarm)
        chosen = HierarchicalCommunicator(self._rendezvous, layout, group, self._alarm)
        try:
            return chosen.connect()
        except BaseException:
            chosen.close()
            raise

    def _exchange(self, subject: str, value: bytes, limit_s: float | None = None) -> list[bytes]:
        visit = Visit(self._rendezvous, subject)
        self._alarm.then(lambda *_: visit.leave())
        return visit.exchange(value, limit_s)

    def _step_aside(self, trouble: str, level: int) -> Communicator:
        """Take Gloo where memory cannot be shared, unless the job insists."""
        if self._rendezvous.backend == "shm":
            raise CollectiveError(f"backend='shm', but memory cannot be shared: {trouble}")
        if trouble not in _said:
            _said.add(trouble)
            logger.log(level, "ranks of one host talk over Gloo, not in shared memory: %s", trouble)
        chosen = self._over_gloo()
        chosen.remark = trouble
        return chosen

    def _over_gloo(self) -> Communicator:
        return GlooCommunicator(self._rendezvous, self._alarm).connect()

    # -- standing for what was chosen ------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether the rank's thread waits for an operation now."""
        return self._chosen is not None and self._chosen.waiting

    @property
    def completed(self) -> int:
        """How many operations have been waited for with success."""
        return 0 if self._chosen is None else self._chosen.completed

    def check(self) -> None:
        """Raise if it is broken."""
        self._alarm.check()

    def abort(self, reason: str) -> None:
        """Break what was chosen, or end the choosing."""
        self._alarm.raise_(reason)

    def cut(self) -> int:
        """Cut the connections to the others, as a broken network would; return how many."""
        return 0 if self._chosen is None else self._chosen.cut()

    def close(self) -> None:
        """Let go of what was chosen."""
        if self._chosen is None:
            self._alarm.raise_("the communicator is closed")
        else:
            self._chosen.close()

    def _target(self) -> Communicator:
        if self._chosen is None:
            self._alarm.check()
            raise RuntimeError("connect() comes before any operation")
        return self._chosen


def _form(door: Door, neighbours: Sequence[int], rank: int, cards: Sequence[Card]) -> Share | None:
    """Share memory with the other ranks of this host, if there are any."""
    place, size = neighbours.index(rank), len(neighbours)
    if size == 1:
        return None
    if place == 0:
        return door.receive(size)
    return door.visit(cards[neighbours[0]].door, place, size)
