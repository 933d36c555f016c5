"""The thread that writes a checkpoint while training goes on."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbelastic.elastic.checkpoint_files import CheckpointFiles
    from nbelastic.elastic.checkpoint_format import Header

__all__ = ["Abandoned", "Writer"]

ABANDON_WAIT = 2.0
"""Most seconds to wait for a thread that was told to give up: a file system may never return."""


class Abandoned(Exception):
    """Nobody wants what is being written any more."""


class Writer:
    """Writes one checkpoint at a time, each in a thread of its own.

    Parameters
    ----------
    files : CheckpointFiles
        Where to.
    tell : callable
        ``tell(detail)`` puts something into the job's history, once; it is called by the thread.

    Attributes
    ----------
    written : tuple of (int, int) or None
        Generation and commit of the newest that is complete.
    """

    def __init__(self, files: CheckpointFiles, tell: Callable[[str], None]) -> None:
        self.written: tuple[int, int] | None = None
        self._files = files
        self._tell = tell
        self._well = False
        self._chunks = 0
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._cancelled = threading.Event()

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, header: Header, payload: Iterator[memoryview]) -> None:
        """Have a checkpoint written, which nobody may change any more. Not while busy."""
        self._done.clear()
        self._thread = threading.Thread(
            target=self._write, args=(header, payload), name="nbelastic-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, deadline: float, moved: Callable[[], None] = lambda: None) -> None:
        """Wait for what is under way; an order to end this rank is obeyed between two looks.

        Parameters
        ----------
        deadline : float
            How long, by the monotonic clock.
        moved : callable, optional
            Called whenever more has been written.
        """
        seen = self._chunks
        while self.busy and time.monotonic() < deadline:
            if self._chunks != seen:
                seen = self._chunks
                moved()
            if self._done.wait(0.1) and self._thread is not None:
                self._thread.join(0.1)

    def abandon(self) -> None:
        """Give up what is under way: no thread and no file of it are left."""
        self._cancelled.set()
        self.wait(time.monotonic() + ABANDON_WAIT)

    def _moving(self) -> None:
        self._chunks += 1
        if self._cancelled.is_set():
            raise Abandoned

    def _write(self, header: Header, payload: Iterator[memoryview]) -> None:
        try:
            path = self._files.write(header, payload, self._moving)
        except Abandoned:
            pass
        except Exception as error:  # file systems raise what they like; training goes on regardless
            self._well = False
            self._tell(f"{self._files.url} cannot be written: {_reason(error)}")
        else:
            self.written = (header.generation, header.version)
            if not self._well:
                self._well = True
                self._tell(f"commit {header.version} is in {path}")
        finally:
            self._done.set()


def _reason(error: Exception) -> str:
    """Return what went wrong without the name of the file, which differs each time."""
    return error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
