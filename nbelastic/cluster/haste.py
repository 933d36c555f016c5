"""Messages that are not held back.

Dask holds a message back for up to 10 ms after the one before, to send several at once. A recovery
is a row of messages, each the answer to another, and would wait at every one.
"""

from __future__ import annotations

from typing import Any

__all__ = ["hasten"]

INTERVAL_S = 0.001


def hasten(stream: Any) -> None:
    """Have a stream of Dask's hold messages back for a millisecond at most.

    Parameters
    ----------
    stream : distributed.batched.BatchedSend or None
        Where it has no such interval, nothing happens.
    """
    interval = getattr(stream, "interval", None)
    if isinstance(interval, float | int) and interval > INTERVAL_S:
        stream.interval = INTERVAL_S
