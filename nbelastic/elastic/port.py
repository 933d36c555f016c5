"""The seam between a rank and whatever carries its messages.

In a job the agent of the rank's worker is on the other side; a test can stand there itself, with
no Dask at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nbelastic.membership import Event, Place

__all__ = ["Port", "RankSpec"]


class Port(Protocol):
    """How a rank reports to its job."""

    def report(self, event: Event) -> None:
        """Send `event` to the driver. Any thread may call it; it returns at once.

        What one rank reports arrives in the order of the calls, or not at all.
        """


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """What a rank is told at its start.

    Attributes
    ----------
    job : str
        Name of the job, unique on its cluster.
    start : int
        Which start of the function this is.
    place : Place
        The rank and sizes that the driver foresees.
    bind : str
        Address of the interface to listen on: the one that Dask uses.
    operation_timeout_s : float
        How long one operation between ranks may take, if nobody aborts it before.
    """

    job: str
    start: int
    place: Place
    bind: str
    operation_timeout_s: float = 120.0
