"""Use of what only Linux has, and a way to keep the garbage collector off."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator

LINUX = sys.platform == "linux" and os.environ.get("NBELASTIC_PORTABLE") != "1"
"""Whether to use what only Linux has: memory shared by native code, forks of a process with torch,
prctl, /proc, sockets that keep messages apart. ``NBELASTIC_PORTABLE=1`` in the environment of
workers does without, as macOS does."""

_COLLECTOR = threading.Lock()
"""Held while the garbage collector is off."""


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Keep garbage from being collected during calls that break if another thread goes on there."""
    with _COLLECTOR:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
