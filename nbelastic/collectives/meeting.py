"""A rank's visit to the store, in the shape in which Gloo asks for it.

Gloo's constructor sets one key, this rank's address, and then waits for those of the others.
:class:`Meeting` turns that into the one exchange that :mod:`nbelastic.collectives.visit` offers.
It is used by the thread that constructs the group; :meth:`Meeting.leave`, which any thread may
call, makes it fail at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store as TorchStore

from nbelastic.collectives.visit import Visit
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from nbelastic.collectives.communicator import Rendezvous

__all__ = ["Meeting"]


class Meeting(TorchStore):
    """A store for one group.

    Parameters
    ----------
    rendezvous : Rendezvous
        Which ranks meet, and where.

    Attributes
    ----------
    addresses : list of bytes
        What each rank brought, in Gloo's encoding; empty until all have come.
    failure : str or None
        Why they could not all be had; Gloo's own exception wraps it beyond recognition.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__()
        self.addresses: list[bytes] = []
        self.failure: str | None = None
        self._visit = Visit(rendezvous)
        self._own = b""

    def set(self, _key: str, value: bytes) -> None:  # type: ignore[override]
        """Take in this rank's address."""
        self._own = bytes(value)

    def wait(self, _keys: Sequence[str], _timeout: timedelta | None = None) -> None:
        """Wait for all ranks, whichever Gloo asks for, and as long as the rendezvous says."""
        if self.addresses:
            return
        try:
            self.addresses = self._visit.exchange(self._own)
        except CollectiveError as error:
            self.failure = str(error)
            raise

    def get(self, key: str) -> bytes:
        """Return the address of the rank that `key` ends in."""
        self.wait([key])
        return self.addresses[int(key.rpartition("/")[2])]

    def leave(self) -> None:
        """Make a visit under way, or to come, fail."""
        self._visit.leave()
