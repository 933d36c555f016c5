"""The same error, raised by one worker after another: the function or the data is at fault.

Each rank that gets a certain sample raises. Whoever leaves out one worker after another loses them
all and has learned nothing. What tells such an error from one of the machines is that it comes back
soon, on another worker, in another generation, and with hardly a commit in between: what is left of
the epoch is dealt anew, and the sample's turn comes first. A device that fails, a full disk, says
the same on different workers too, but hours apart; the memory of an error ends with progress.

Several errors in one generation are one blow: they were raised at once, not one after another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["BLOWS", "Blow", "Repeats", "count"]

BLOWS = 3
"""How often the same error is raised, on one worker after another, before the job fails."""

NEAR_COMMITS = 1
"""Blows with no more commits than this in between belong together, however far apart they are."""

NEAR_SECONDS = 60.0
"""Blows no further apart than this belong together, however many commits are in between."""

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Blow:
    """An error that a member raised.

    Attributes
    ----------
    start : int
        Which start of the function raised it.
    worker, host : str
        Where: the worker's name on its host, which outlives a restart, and the host.
    generation, version : int
        When: the generation, and the job's newest commit.
    time : float
        When, in seconds.
    error : str
        The exception in one line.
    """

    start: int
    worker: str
    host: str
    generation: int
    version: int
    time: float
    error: str

    def near(self, version: int, time: float) -> bool:
        """Return whether there has been hardly any progress since."""
        return version - self.version <= NEAR_COMMITS or time - self.time <= NEAR_SECONDS


@dataclass
class Repeats:
    """Errors that members raised lately, those that are equal together.

    Attributes
    ----------
    chains : dict of str to list of Blow
        By error, with memory addresses taken out, in the order in which they were raised.
    last : str
        The newest error.
    """

    chains: dict[str, list[Blow]] = field(default_factory=dict)
    last: str = ""

    def note(self, blow: Blow) -> list[Blow]:
        """Take in an error and return the chain that it belongs to, itself included."""
        self.chains = {
            error: chain
            for error, chain in self.chains.items()
            if chain[-1].near(blow.version, blow.time)
        }
        chain = self.chains.setdefault(_ADDRESS.sub("0x…", blow.error), [])
        chain.append(blow)
        self.last = blow.error
        return chain


def count(chain: list[Blow]) -> int:
    """Return how often the error of a chain came back on a worker that had not raised it yet."""
    workers: set[str] = set()
    generations: set[int] = set()
    for blow in chain:
        if blow.worker not in workers:
            workers.add(blow.worker)
            generations.add(blow.generation)
    return len(generations)
