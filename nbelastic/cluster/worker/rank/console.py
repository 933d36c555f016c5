"""Set up the standard streams of a rank, which has no console."""

from __future__ import annotations

import io
import sys
from typing import NoReturn

NO_CONSOLE = (
    "breakpoint(), pdb and input() need a console, and a rank has none. To debug the function, "
    "call it in the notebook without fit: outside a job it runs there, as a world of one rank"
)


class _NoInput(io.TextIOWrapper):
    """Standard input without any; reading it says what to do."""

    def read(self, size: int | None = -1, /) -> NoReturn:
        raise EOFError(NO_CONSOLE)

    def readline(self, size: int = -1, /) -> NoReturn:  # type: ignore[override]
        raise EOFError(NO_CONSOLE)


def set_up_streams() -> None:
    """Send output line by line, and refuse to read from the console."""
    # Those of the rank server know whether its own descriptors could seek, which a pipe cannot.
    sys.stdout = sys.__stdout__ = _lines(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _lines(2)  # type: ignore[misc]
    sys.stdin = _NoInput(open(0, "rb", closefd=False), encoding="utf-8")  # noqa: SIM115


def _lines(descriptor: int) -> io.TextIOWrapper:
    stream = open(descriptor, "wb", closefd=False)  # noqa: SIM115 - for the life of the process
    return io.TextIOWrapper(
        stream, encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
