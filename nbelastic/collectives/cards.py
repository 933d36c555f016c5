"""What ranks tell each other of themselves before they choose how tensors are to travel.

Each rank brings a card. All see all cards, and draw from them, with nothing else, the same
conclusion: which ranks say that they are on one host, and whether those can share memory. That they
really are on one host, they prove to each other later (:mod:`nbelastic.collectives.host`).
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nbelastic.errors import CollectiveError
from nbelastic.native import core, missing

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Card", "Layout", "this_host", "why_not"]

VERSION = 1
"""Of cards, and of what ranks of a host say to each other."""


def this_host() -> str:
    """Return what ranks of one host have in common: its boot, their network, and their user."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return f"{uuid.getnode():x}/{user}"
    return f"{boot}/{network}/{user}"


def why_not() -> str:
    """Return why this process cannot share memory, or nothing."""
    if not sys.platform.startswith("linux"):
        return "memory is shared on Linux only"
    if core is None:
        return f"nbelastic's part in C++ is not there ({missing})"
    try:
        os.close(core.create(1))
    except OSError as error:
        return f"no memory can be shared: {error}"
    return ""


@dataclass(frozen=True)
class Card:
    """What a rank tells of itself.

    Attributes
    ----------
    trouble : str
        Why it cannot share memory; empty if it can.
    host : str
        Where it says that it is.
    door : str
        The name of the socket on which it meets others of its host.
    """

    trouble: str
    host: str
    door: str

    def encode(self) -> bytes:
        """Return it as bytes."""
        return json.dumps([VERSION, *astuple(self)]).encode()

    @classmethod
    def decode(cls, data: bytes, rank: int) -> Card:
        """Read the card of a rank.

        Raises
        ------
        CollectiveError
            It is not one of this version.
        """
        try:
            version, *fields = json.loads(data)
        except (ValueError, TypeError):
            version, fields = None, []
        plain = len(fields) == 3 and all(isinstance(field, str) for field in fields)
        if version != VERSION or not plain:
            raise CollectiveError(f"rank {rank} speaks another language: not this nbelastic's")
        return cls(*fields)


@dataclass(frozen=True)
class Layout:
    """Which ranks are on which host, as far as they say.

    Attributes
    ----------
    hosts : tuple of tuple of int
        The ranks of each host in order; hosts in the order of their first rank.
    trouble : str
        Why ranks of one host cannot share memory; empty if all who have neighbours can.
    """

    hosts: tuple[tuple[int, ...], ...]
    trouble: str

    @classmethod
    def of(cls, cards: Sequence[Card]) -> Layout:
        """Draw the conclusion."""
        by_host: dict[str, list[int]] = {}
        for rank, card in enumerate(cards):
            by_host.setdefault(card.host, []).append(rank)
        hosts = tuple(tuple(ranks) for ranks in by_host.values())
        neighbours = sorted(rank for ranks in hosts if len(ranks) > 1 for rank in ranks)
        unable = [rank for rank in neighbours if cards[rank].trouble]
        return cls(hosts, f"rank {unable[0]}: {cards[unable[0]].trouble}" if unable else "")

    @property
    def crowded(self) -> bool:
        """Whether any host has more than one rank."""
        return any(len(ranks) > 1 for ranks in self.hosts)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's host, itself too."""
        return next(ranks for ranks in self.hosts if rank in ranks)

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks in a rank's position on all hosts; none if some host has none there."""
        place = self.neighbours(rank).index(rank)
        return tuple(ranks[place] for ranks in self.hosts) if place < self.slices else ()

    @property
    def slices(self) -> int:
        """How many positions every host has: the size of the smallest."""
        return min(len(ranks) for ranks in self.hosts)
