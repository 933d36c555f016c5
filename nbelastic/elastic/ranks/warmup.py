"""Warm-up of a rank before its report of being ready, while other ranks train.

A newcomer touches the memory for the state that it will receive, and that its first step takes. The
first generation that a process forms takes ten times as long as the second: modules are imported,
libraries loaded, threads and sockets made. So a newcomer first forms a generation of two with
itself, sums and sends something, and closes it again.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from nbelastic.collectives import connect
from nbelastic.elastic.state.state_payload import ReceiveBuffer, StatePayload
from nbelastic.elastic.state.transfer import spread
from nbelastic.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.collectives import Rendezvous
    from nbelastic.elastic.ranks.runtime import RankRuntime, RankSpec

LIMIT_S = 5.0
"""Seconds that an operation may take in a generation that a rank forms alone."""


def warm_up(
    spec: RankSpec, alone: Rendezvous, runtime: RankRuntime, step_bytes: Callable[[], int]
) -> ReceiveBuffer | None:
    """Prepare to join ranks that train, or to be joined where a rank is to train alone.

    Returns memory for the state that the rank will receive, if it will receive one. Then its first
    step's memory is touched as well.
    """
    runtime.on_set_up(step_bytes() if spec.state_bytes else 0)
    buffer = ReceiveBuffer.for_state(spec.state_bytes) if spec.state_bytes else None
    if spec.state_bytes is not None or spec.place.size == 1:
        runtime.form_alone(alone)
    return buffer


def form_alone(rendezvous: Rendezvous) -> None:
    """Form a generation of two ranks in this process, and close it.

    Errors are ignored, because the next generation that is formed will report them.
    """
    terms = replace(rendezvous, generation=1, size=2, timeout_s=LIMIT_S)
    if terms.backend in ("cuda_ipc", "nccl"):  # ranks of one process share a GPU
        terms = replace(terms, backend="auto")
    other = threading.Thread(
        target=_take_part, args=(replace(terms, rank=1),), name="nbelastic-warmup"
    )
    other.start()
    _take_part(replace(terms, rank=0))
    other.join()


def _take_part(terms: Rendezvous) -> None:
    import torch

    with contextlib.suppress(CollectiveError):
        communicator = connect(terms)
        try:
            communicator = communicator.connect()
            communicator.allreduce(torch.zeros(1))
            payload = StatePayload(b"", [torch.zeros(1)]) if terms.rank == 0 else None
            spread(communicator, [0, 1], payload)
            communicator.barrier()
        finally:
            communicator.close()
