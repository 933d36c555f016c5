"""What a rank does before it says that it is ready, so that others need not wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.elastic.room import Room

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives import Rendezvous
    from nbelastic.elastic.port import Means, RankSpec

__all__ = ["prepare"]


def prepare(
    spec: RankSpec,
    alone: Rendezvous,
    means: Means,
    warm_up: Callable[[], Sequence[tuple[int, int]]] | None,
) -> Room | None:
    """Get ready to join others who train, or to be joined where a rank is to train alone.

    Parameters
    ----------
    spec : RankSpec
        What the rank was told.
    alone : Rendezvous
        How it meets nobody.
    means : Means
        What the rank meets others with.
    warm_up : callable or None
        Has the rank's state do what it does for the first time, if others train already; returns
        the addresses and sizes of memory that it took for it.

    Returns
    -------
    Room or None
        Memory for the state that will come, if one will.
    """
    means.settled()
    room = None
    if spec.state_bytes:
        room = Room.for_state(spec.state_bytes)
        if warm_up is not None:
            means.filled(warm_up())
    if spec.state_bytes is not None or spec.place.size == 1:
        means.rehearse(alone)
    return room
