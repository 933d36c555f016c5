"""Threads for writing a checkpoint while training goes on, and for reading.

A file system may never answer.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.elastic.checkpoint.files import CheckpointFiles
    from nbelastic.elastic.checkpoint.format import Header, StoredTensor

T = TypeVar("T")

ABANDON_WAIT = 2.0
"""Most seconds to wait for a thread after cancelling it: a file system may never return."""


class Abandoned(Exception):
    """The checkpoint that is being written was cancelled."""


class Writer:
    """Writer of one checkpoint at a time, each in a thread of its own."""

    def __init__(self, files: CheckpointFiles, report: Callable[[str], None]) -> None:
        self.written: tuple[int, int] | None = None  # generation and commit of the newest
        self._files = files
        self._report = report  # adds a text to the job's history; the thread calls it
        self._well = False
        self._chunks = 0
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._cancelled = threading.Event()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, header: Header, tensors: dict[str, StoredTensor]) -> None:
        """Begin to write a checkpoint, which must not change any more. Not while busy."""
        self._done.clear()
        self._thread = threading.Thread(
            target=self._write, args=(header, tensors), name="nbelastic-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, deadline: float, on_progress: Callable[[], None] = lambda: None) -> None:
        """Wait for the checkpoint that is being written, until `deadline` by the monotonic clock.

        This rank can be interrupted meanwhile.
        """
        seen = self._chunks
        while self.busy and time.monotonic() < deadline:
            if self._chunks != seen:
                seen = self._chunks
                on_progress()
            if self._done.wait(0.1) and self._thread is not None:
                self._thread.join(0.1)

    def abandon(self) -> None:
        """Cancel the checkpoint that is being written: neither thread nor file remains."""
        self._cancelled.set()
        self.wait(time.monotonic() + ABANDON_WAIT)

    def _on_chunk(self) -> None:
        self._chunks += 1
        if self._cancelled.is_set():
            raise Abandoned

    def _write(self, header: Header, tensors: dict[str, StoredTensor]) -> None:
        try:
            path = self._files.write(header, tensors, self._on_chunk)
        except Abandoned:
            pass
        except Exception as error:  # file systems raise what they like; training goes on regardless
            self._well = False
            self._report(f"{self._files.url} cannot be written: {_reason(error)}")
        else:
            self.written = (header.generation, header.version)
            if not self._well:
                self._well = True
                self._report(f"commit {header.version} is in {path}")
        finally:
            self._done.set()


def _reason(error: Exception) -> str:
    """Return an error's text without the name of the file, which differs each time."""
    return error.strerror if isinstance(error, OSError) and error.strerror else repr(error)


class Reader:
    """Calls of functions that read, each in a thread of its own, with a time limit."""

    def __init__(self, patience: float, on_progress: Callable[[], None]) -> None:
        self._patience = patience  # seconds without progress after which a call fails
        self._on_progress = on_progress  # called by the thread that waits
        self._steps = 0
        self._given_up = False

    def on_progress(self) -> None:
        """Record progress. The called function must call this."""
        self._steps += 1  # in the reading thread, which ends here if nothing waits for it
        if self._given_up:
            raise TimeoutError

    def call(self, function: Callable[[], T]) -> T:
        """Return a function's result, or raise its exception; without progress, TimeoutError.

        In that case the thread ends when its file system answers.
        """
        outcome: list[Any] = []
        done = threading.Event()

        def run() -> None:
            try:
                outcome[:] = [function(), None]
            except BaseException as error:  # the waiting thread raises it again
                outcome[:] = [None, error]
            finally:
                done.set()

        thread = threading.Thread(target=run, name="nbelastic-checkpoint-reader", daemon=True)
        thread.start()
        try:
            self._wait(done)
        except BaseException:
            self._given_up = True
            raise
        thread.join()
        self._on_progress()
        result, error = outcome
        if error is not None:
            raise error
        found: T = result
        return found

    def _wait(self, done: threading.Event) -> None:
        seen, since = self._steps, time.monotonic()
        while not done.wait(min(0.1, self._patience / 4)):
            if self._steps != seen:
                seen, since = self._steps, time.monotonic()
                self._on_progress()
            elif time.monotonic() - since > self._patience:
                raise TimeoutError(f"nothing was read for {self._patience:g} s")
