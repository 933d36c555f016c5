"""Capture the output of ranks, by thread.

Runs in a worker, in the threads of ranks. ``sys.stdout`` belongs to all threads of the process.
While any rank runs, a router replaces it: text of a rank's thread goes to that rank's sink. Text of
other threads goes there too if the process runs exactly one rank, else to the original.

The router can do what code expects of a console's stream. Its descriptor is the original's, because
``faulthandler`` keeps it for the life of the process. The module ``subprocess`` alone gets a pipe,
so that output of a child process to ``sys.stdout`` goes to the rank's sink, too.
"""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import io
import os
import select
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Buffer

    Sink = Callable[[str], None]

__all__ = ["NO_CONSOLE", "captured", "drain_pipes"]

NO_CONSOLE = (
    "breakpoint(), pdb and input() need a console, and a rank has none. To debug the function, "
    "call it in the notebook without fit: outside a job it runs there, as a world of one rank"
)

_PIPE_BYTES = 1 << 16
_PATIENCE = 1.0
"""Seconds to wait at a rank's end for what its child processes have written."""

_sink: contextvars.ContextVar[Sink | None] = contextvars.ContextVar("nbelastic_sink", default=None)
_sinks: list[Sink] = []
_pipes: dict[tuple[Sink, str], _Pipe] = {}
_lock = threading.Lock()
_stands_in: list[tuple[str, TextIO, TextIO]] = []


def _sink_of_thread() -> Sink | None:
    """Return where the calling thread's output goes, if it is a rank's."""
    sink = _sink.get()
    if sink is None and len(_sinks) == 1 and not _is_frameworks(threading.current_thread()):
        return _sinks[0]
    return sink


class _Router(io.TextIOBase):
    """A text stream that writes to the sink of the calling rank."""

    def __init__(self, name: str, original: TextIO) -> None:
        self.name = f"<{name}>"
        self.mode = "w"
        self.original = original
        self._process = os.getpid()
        self._bytes: _Bytes | None = None

    def sink(self) -> Sink | None:
        """Return the calling rank's sink; None where the original is meant."""
        return _sink_of_thread() if os.getpid() == self._process else None

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        sink = self.sink()
        if sink is None:
            return self.original.write(text)
        sink(text)
        return len(text)

    def flush(self) -> None:
        self.original.flush()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        sink = self.sink()
        of_child = sys._getframe(1).f_globals.get("__name__") == "subprocess"
        if sink is not None and of_child and hasattr(select, "poll"):  # not on Windows
            return _pipe_to(sink, self.name)
        return self.original.fileno()

    def reconfigure(self, **options: Any) -> None:
        """Do nothing: a sink takes text as it is, at once."""
        known = {"encoding", "errors", "newline", "line_buffering", "write_through"}
        if unknown := options.keys() - known:
            raise TypeError(f"reconfigure() got an unexpected argument {min(unknown)!r}")

    @property
    def buffer(self) -> _Bytes:
        """A stream of bytes, which are taken for UTF-8."""
        if self._bytes is None or self._bytes.closed:  # a wrapper closes what it has wrapped
            self._bytes = _Bytes(self)
        return self._bytes

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "replace"

    @property
    def write_through(self) -> bool:
        """Return True: nothing is kept back."""
        return True

    @property
    def line_buffering(self) -> bool:
        return True


class _Bytes(io.BufferedIOBase):
    """The bytes behind a router."""

    def __init__(self, router: _Router) -> None:
        self._router = router
        self._of_thread = threading.local()  # a character may be split between two writes

    def write(self, data: Buffer) -> int:
        view = memoryview(data)
        if self._router.sink() is None and hasattr(self._router.original, "buffer"):
            self._router.original.buffer.write(view)
            return view.nbytes
        decoder = getattr(self._of_thread, "decoder", None)
        if decoder is None:
            decoder = self._of_thread.decoder = _decoder()
        self._router.write(decoder.decode(view.cast("B")))
        return view.nbytes

    def flush(self) -> None:
        self._router.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._router.original.fileno()

    @property
    def raw(self) -> io.RawIOBase:
        """The stream itself: there is nothing beneath it."""
        return cast(io.RawIOBase, self)


class _NoInput(io.TextIOBase):
    """Standard input, which a rank has none of. Other threads have the original's."""

    def __init__(self, original: TextIO | None) -> None:
        self.name = "<stdin>"
        self.mode = "r"
        self._original = original

    def _source(self) -> TextIO:
        if self._original is None or _sink_of_thread() is not None:
            raise EOFError(NO_CONSOLE)
        return self._original

    def read(self, size: int | None = -1, /) -> str:
        return self._source().read(-1 if size is None else size)

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        return self._source().readline(size)

    def __next__(self) -> str:  # type: ignore[override]
        return next(self._source())

    def readable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        if self._original is None:
            raise io.UnsupportedOperation("fileno")
        return self._original.fileno()

    def detach(self) -> NoReturn:
        raise io.UnsupportedOperation("detach")

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


class _Pipe:
    """Passes on to a rank's sink what its child processes write."""

    def __init__(self, sink: Sink) -> None:
        self._source, self.end = os.pipe()
        self._sink = sink
        self._decoder = _decoder()
        self._reading = threading.Lock()
        self._at_end = self._over = False
        self._thread = threading.Thread(target=self._run, name="nbelastic-output", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._at_end:
            self._wait()
            self.drain()
        os.close(self._source)

    def drain(self) -> None:
        """Pass on what is in the pipe now, from any thread."""
        with self._reading:
            while not self._at_end and self._wait(0):
                data = os.read(self._source, _PIPE_BYTES)
                self._at_end = not data
                if not self._over:
                    self._sink(self._decoder.decode(data, final=not data))

    def _wait(self, milliseconds: int | None = None) -> bool:
        """Return whether there is something to read, or the end; wait for it."""
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        return bool(poll.poll(milliseconds))

    def close(self) -> None:
        """Let go of the pipe. What a child writes after the rank's end is read and dropped."""
        os.close(self.end)
        self._thread.join(_PATIENCE)
        self._over = True


def _pipe_to(sink: Sink, name: str) -> int:
    with _lock:
        if (sink, name) not in _pipes:
            _pipes[sink, name] = _Pipe(sink)
        return _pipes[sink, name].end


def drain_pipes(sink: Sink) -> None:
    """Pass on what child processes have written for `sink` so far.

    A child that has ended has written all of its output, but the thread that reads it may be late.
    """
    with _lock:
        pipes = [pipe for (of, _), pipe in _pipes.items() if of == sink]
    for pipe in pipes:
        pipe.drain()


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _is_frameworks(thread: threading.Thread) -> bool:
    """Return whether a thread was there before any rank: the event loop's, or Dask's pools."""
    return (
        thread is threading.main_thread()
        or "Dask-" in thread.name  # with the worker's name before it
        or thread.name.startswith(("IO loop", "Profile", "Event loop"))
    )


@contextlib.contextmanager
def captured(sink: Sink) -> Iterator[None]:
    """Send what the calling thread prints to `sink`, for the length of a block."""
    token = _sink.set(sink)
    with _lock:
        _sinks.append(sink)
        if len(_sinks) == 1:
            _stand_in()
    try:
        yield
    finally:
        with _lock:
            pipes = [_pipes.pop(key) for key in list(_pipes) if key[0] == sink]
        for pipe in pipes:
            pipe.close()
        with _lock:
            _sinks.remove(sink)
            if not _sinks:
                _stand_aside()
        _sink.reset(token)


def _stand_in() -> None:
    for name in ("stdout", "stderr", "stdin"):
        original = getattr(sys, name)
        stand_in = _NoInput(original) if name == "stdin" else _Router(name, original)
        _stands_in.append((name, original, cast(TextIO, stand_in)))
        setattr(sys, name, stand_in)


def _stand_aside() -> None:
    for name, original, stand_in in _stands_in:
        if getattr(sys, name, None) is stand_in:  # a rank may have replaced or deleted it
            setattr(sys, name, original)
    _stands_in.clear()
