"""Stopwatch for the forward and backward passes of micro-batches."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

clock = time.perf_counter


class Stopwatch:
    """Time of micro-batches, from when each was handed out until the next was asked for.

    So neither waiting for data nor waiting for other ranks is in it. On CUDA devices, kernels run
    later than they are launched. Their time is taken by events on the stream, of which only those
    that are over are read: nothing waits for the device.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._opened: Any = None
        self._spans: deque[tuple[Any, Any]] = deque()
        self._seconds: list[float] = []

    def start(self) -> None:
        """Begin a micro-batch."""
        self._opened = _event() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._began = clock()

    def stop(self) -> None:
        """End it."""
        if self._opened is None:
            self._seconds.append(clock() - self._began)
        else:
            self._spans.append((self._opened, _event()))

    def take(self) -> float | None:
        """Return the mean time of those whose end is known and was not taken; None without any."""
        while self._spans and self._spans[0][1].query():
            first, last = self._spans.popleft()
            self._seconds.append(first.elapsed_time(last) / 1e3)
        seconds, self._seconds = self._seconds, []
        return sum(seconds) / len(seconds) if seconds else None


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
