"""One start of the function, and where it and its job can stand."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, Protocol

from .model import FRESH, Slot

__all__ = ["Phase", "Rank", "Stage"]


class Phase(str, enum.Enum):
    """Where a job stands.

    ``GATHERING`` waits for ranks to be ready for the next generation, ``FORMING`` for the ranks of
    a plan to connect; in ``RUNNING`` they train; in ``FINISHING`` all have left the elastic loop;
    in ``ENDING`` the outcome is known and ranks are being ended; ``ENDED`` is for ever.
    """

    GATHERING = "gathering"
    FORMING = "forming"
    RUNNING = "running"
    FINISHING = "finishing"
    ENDING = "ending"
    ENDED = "ended"


class Stage(str, enum.Enum):
    """Where a rank stands.

    ``STARTING`` until it reports ready; ``READY`` without a generation; ``MEMBER`` of the present
    one; ``DONE`` with its elastic loop, waiting for the others; ``RETURNED`` from its function;
    ``ENDING``, told to end and not heard of since.
    """

    STARTING = "starting"
    READY = "ready"
    MEMBER = "member"
    DONE = "done"
    RETURNED = "returned"
    ENDING = "ending"


_COUNTED = frozenset({"stage", "version", "loop", "planned", "formed", "leaving"})


class _Counts(Protocol):
    def count(self, rank: Rank) -> None: ...
    def discount(self, rank: Rank, *, moves: bool) -> None: ...


@dataclass(eq=False)
class Rank:
    """One start of the function. `planned` is the newest generation it was planned into.

    What :class:`~.ranks.Ranks` counts is counted anew with every change, so that no change can
    be forgotten.
    """

    start: int
    slot: Slot
    since: float
    stage: Stage = Stage.STARTING
    version: float = FRESH
    loop: int = 0
    store: tuple[str, int] = ("", 0)
    unreached: tuple[int, ...] = ()
    planned: int = 0
    formed: bool = False
    leaving: bool = False
    progress: int = 0
    waiting: bool = False
    moved_at: float = 0.0
    heard_at: float = 0.0
    version_at_join: float = 0

    counted_by: ClassVar[_Counts | None] = None

    def __setattr__(self, name: str, value: object) -> None:
        ranks = self.counted_by if name in _COUNTED else None
        if ranks is None:
            self.__dict__[name] = value
        elif getattr(self, name) != value:
            ranks.discount(self, moves=name == "stage")
            self.__dict__[name] = value
            ranks.count(self)

    def change(self, **fields: object) -> None:
        """Change several fields at once, and count once."""
        ranks = self.counted_by
        if ranks is not None:
            ranks.discount(self, moves=fields.get("stage", self.stage) != self.stage)
        self.__dict__.update(fields)
        if ranks is not None:
            ranks.count(self)

    def hear(self, now: float, progress: int, waiting: bool) -> None:
        """Take in a heartbeat. Nothing of it is counted: the short way."""
        fields = self.__dict__
        fields["heard_at"] = now
        if progress != fields["progress"] or waiting != fields["waiting"]:
            fields["moved_at"] = now
            fields["progress"] = progress
            fields["waiting"] = waiting

    def hold(self, version: float) -> None:
        """Note its last commit, for who has seen to the counts: the short way."""
        self.__dict__["version"] = version

    def waits(self, phase: Phase) -> bool:
        """Return whether the rank waits for others, be it in a collective or at its loop's end."""
        return self.waiting or (self.stage == Stage.DONE and phase == Phase.RUNNING)
