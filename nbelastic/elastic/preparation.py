"""What a rank does before it says that it is ready, so that others need not wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.elastic.room import Room

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.collectives import Rendezvous
    from nbelastic.elastic.port import RankSpec

__all__ = ["prepare"]


def prepare(
    spec: RankSpec,
    secret: bytes,
    store: tuple[str, int],
    rehearse: Callable[[Rendezvous], None],
) -> Room | None:
    """Get ready to join others who train, or to be joined where a rank is to train alone.

    Parameters
    ----------
    spec : RankSpec
        What the rank was told.
    secret : bytes
        The job's.
    store : tuple of (str, int)
        Address of the rank's own store.
    rehearse : callable
        See :class:`~nbelastic.elastic.port.Means`.

    Returns
    -------
    Room or None
        Memory for the state that will come, if one will.
    """
    room = Room.for_state(spec.state_bytes) if spec.state_bytes else None
    if spec.state_bytes is not None or spec.place.size == 1:
        rehearse(spec.alone(store, secret))
    return room
