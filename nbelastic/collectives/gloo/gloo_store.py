"""Adapter from Gloo's store interface to one exchange at the rendezvous server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store

from nbelastic.collectives.rendezvous.client import RendezvousClient
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from nbelastic.collectives.communicator import Rendezvous


class GlooStore(Store):
    """A store for the constructor of one Gloo group.

    The constructor sets one key, this rank's address, then waits for those of the other ranks. The
    thread that constructs the group uses the store; any thread may call :meth:`abort`.
    `addresses`, by rank in Gloo's encoding, is empty until all ranks have arrived. `failure` is why
    the exchange failed, which Gloo's own exception hides.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__()
        self.addresses: list[bytes] = []
        self.failure: str | None = None
        self._client = RendezvousClient(rendezvous)
        self._own = b""

    def set(self, _key: str, value: bytes) -> None:  # type: ignore[override]
        """Take this rank's address."""
        self._own = bytes(value)

    def wait(self, _keys: Sequence[str], _timeout: timedelta | None = None) -> None:
        """Wait for all ranks, for as long as the rendezvous allows."""
        if self.addresses:
            return
        try:
            self.addresses = self._client.exchange(self._own)
        except CollectiveError as error:
            self.failure = str(error)
            raise

    def get(self, key: str) -> bytes:
        """Return the address of the rank that `key` ends in."""
        self.wait([key])
        return self.addresses[int(key.rpartition("/")[2])]

    def abort(self) -> None:
        """Fail the exchange, under way or to come."""
        self._client.abort()
