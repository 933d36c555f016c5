"""Fetch partitions of Dask collections for a rank.

Runs in a worker, in the threads of ranks and those that read ahead for them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from nbelastic.cluster.dask_compat import key_of, value_of

if TYPE_CHECKING:
    from distributed import Worker

__all__ = ["PartitionFetcher"]

_MISSING = object()


class PartitionFetcher:
    """Fetches partitions from the memory of this worker, else over the network.

    Parameters
    ----------
    worker : distributed.Worker
        The worker of the rank.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()

    def __call__(self, text: str) -> Any:
        """Return the value of a key, which is given as JSON.

        If no worker has it any more, Dask computes it again, and this waits for it.

        Raises
        ------
        LookupError
            The scheduler has forgotten the key.
        """
        key = key_of(text)
        found = self._worker.data.get(key, _MISSING)
        if found is not _MISSING:
            return found
        with self._lock:  # two threads would make two clients
            client = self._worker._get_client()
        return value_of(client, key)
