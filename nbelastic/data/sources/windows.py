"""Thread that reads windows ahead, within a bound on memory."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbelastic.data.plan import Window
    from nbelastic.data.sources.row_block import RowBlock

COPIES = 3
"""Copies of a window that exist while it is read: as a table, joined, and permuted."""

JOIN_LIMIT = 5.0
"""Most seconds to wait for the thread at the end: a file system may never return."""


@dataclass(frozen=True)
class LoadedWindow:
    """A window and its rows, in their order."""

    window: Window
    rows: RowBlock


# The thread runs only while there is a window to read and memory for it. `take` starts it again.
# So a reader that is given up without a word leaves no thread that waits for ever: the thread ends
# when memory is full. One lock guards all fields. Windows become ready in the order in which they
# are needed, thus `take` needs no key, and an error is raised at the batch that needs its window.


class WindowReader:
    """Reader of windows, in the order in which they are needed."""

    def __init__(
        self,
        windows: Iterator[Window],
        read: Callable[[Window], LoadedWindow],
        size_of: Callable[[Window], int],
        memory: int,
        kept: dict[tuple[int, int], LoadedWindow],
    ) -> None:
        self._windows = windows  # the thread advances it
        self._read = read  # the thread calls it
        self._size_of = size_of  # bytes that a window will probably take
        # Bytes for windows, those that were taken and are not released included. A window that is
        # waited for is read regardless.
        self._memory = memory
        self._kept = kept  # windows in memory, by stream and number
        self._held = sum(each.rows.nbytes for each in kept.values())
        self._changed = threading.Condition()
        self._ready: deque[LoadedWindow | BaseException] = deque()
        self._next = next(windows, None)
        self._awaited = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    def take(self) -> LoadedWindow:
        """Return the next window, or raise what reading it has raised; wait for it if need be."""
        with self._changed:
            self._awaited = True
            self._start()
            while not self._ready:
                self._changed.wait(0.1)  # so that the rank can be interrupted
            self._awaited = False
            found = self._ready[0]
            if isinstance(found, BaseException):
                raise found  # again, if it is asked for again
            self._ready.popleft()
            self._start()
            return found

    def release(self, taken: LoadedWindow) -> None:
        """Give back the memory of a window that was taken."""
        with self._changed:
            self._held -= taken.rows.nbytes
            self._start()

    def stop(self) -> list[LoadedWindow]:
        """End the thread, and return the windows that were read and not taken."""
        with self._changed:
            self._stopped = True
            thread = self._thread
        # The collector of garbage may end an iterator, and with it its reader, in any thread.
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_LIMIT)
        with self._changed:
            left = [each for each in self._ready if isinstance(each, LoadedWindow)]
            return [*left, *self._kept.values()]

    def _may_read(self) -> bool:
        if self._next is None or self._stopped:
            return False
        if (self._next.stream, self._next.number) in self._kept:
            return True
        fits = self._held + COPIES * self._size_of(self._next) <= self._memory
        return fits or (self._awaited and not self._ready)

    def _start(self) -> None:
        if self._thread is None and self._may_read():
            self._thread = threading.Thread(target=self._run, name="nbelastic-reader", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._read_ahead()
        except BaseException as error:  # a thread that ended would be waited for forever
            with self._changed:
                self._next = None
                self._ready.append(error)
                self._changed.notify_all()

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                window = self._next
                if window is None or not self._may_read():
                    self._thread = None
                    return
                found: LoadedWindow | BaseException | None
                found = self._kept.pop((window.stream, window.number), None)
                known = found is not None
            if found is None:
                try:
                    found = self._read(window)
                except BaseException as error:  # a thread that ended would be waited for forever
                    found = error
            with self._changed:
                self._ready.append(found)
                if isinstance(found, BaseException):
                    self._next = None
                else:
                    self._held += 0 if known else found.rows.nbytes
                    self._next = next(self._windows, None)
                self._changed.notify_all()
