"""What a newcomer tries by itself, so that nobody waits while it does things for the first time.

The first generation that a process forms takes ten times as long as the second: modules are
imported, libraries loaded, threads and sockets made. So before a newcomer says that it is ready, it
forms a generation of two with itself, sums and sends something, and closes it again.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from nbelastic.collectives import connect
from nbelastic.elastic.parcel import Parcel
from nbelastic.elastic.transfer import spread
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from nbelastic.collectives import Rendezvous

__all__ = ["rehearse"]

LIMIT_S = 5.0


def rehearse(rendezvous: Rendezvous) -> None:
    """Form a generation of two with itself, and take it down again.

    It is no trial: where it fails, the generations to come will tell why.

    Parameters
    ----------
    rendezvous : Rendezvous
        How this rank meets others; of it, the job's name, the store and the backend count.
    """
    terms = replace(rendezvous, generation=1, size=2, timeout_s=LIMIT_S)
    partner = threading.Thread(
        target=_take_part, args=(replace(terms, rank=1),), name="nbelastic-rehearsal"
    )
    partner.start()
    _take_part(replace(terms, rank=0))
    partner.join()


def _take_part(terms: Rendezvous) -> None:
    import torch

    with contextlib.suppress(CollectiveError):
        communicator = connect(terms)
        try:
            communicator = communicator.connect()
            communicator.allreduce(torch.zeros(1))
            parcel = Parcel(b"", [torch.zeros(1)]) if terms.rank == 0 else None
            spread(communicator, [0, 1], parcel)
            communicator.barrier()
        finally:
            communicator.close()
