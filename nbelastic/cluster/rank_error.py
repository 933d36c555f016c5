"""Pack an error of a rank: summary, frames, and the error where it pickles.

Packed in the thread of the rank, unpacked in the kernel, in the driver's thread.
"""

from __future__ import annotations

import linecache
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from nbelastic.errors import summary_of
from nbelastic.messages import MOST_BYTES, CodeLine, PackedError
from nbelastic.pickling import dumps

_TRACEBACK: Any = BaseException.__dict__["__traceback__"]
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MOST_FRAMES = 30  # frames that are shown, the innermost

_NOT_USERS = (_PACKAGE, "<frozen ")
"""How names of files begin that are not the user's: this package's, and of Python's own imports."""


@dataclass(frozen=True)
class Failure:
    """An error as it arrived."""

    summary: str  # type and message in one line
    frames: tuple[CodeLine, ...]  # the user's own lines, outermost first; all if none is the user's
    exception: BaseException | None  # where it could be pickled there and unpickled here

    def where(self, label: Callable[[str], str | None] = lambda _: None) -> str:
        """Return the user's lines, as a traceback shows them; `label` has better names of files."""
        left_out = len(self.frames) - MOST_FRAMES  # a recursion has a thousand
        lines = [f"  [{left_out} more frames]"] if left_out > 0 else []
        for frame in self.frames[-MOST_FRAMES:]:
            place = label(frame.file) or f'File "{frame.file}"'
            lines.append(f"  {place}, line {frame.line}, in {frame.function}")
            text = frame.text or linecache.getline(frame.file, frame.line).strip()
            lines += [f"    {text}"] if text else []
        return "\n".join(lines)


def pack_error(error: BaseException) -> PackedError:
    """Pack an error. Raises nothing, whatever the error's class does."""
    return PackedError(summary_of(error), _frames(error), _pickled(error))


def _frames(error: BaseException) -> tuple[CodeLine, ...]:
    try:
        frames = traceback.extract_tb(_TRACEBACK.__get__(error))
        own = [frame for frame in frames if not frame.filename.startswith(_NOT_USERS)]
        if not own and issubclass(type(error), SyntaxError):
            return ()  # its message has the place
        return tuple(
            CodeLine(f.filename, f.lineno or 0, f.name, f.line or "") for f in own or frames
        )
    except BaseException:  # source lines come from loaders of the user's modules
        return ()


def _pickled(error: BaseException) -> bytes:
    """Return an error without its traceback, pickled; nothing where that cannot be done."""
    try:
        BaseException.with_traceback(error, None)
        pickled = dumps(error)
        return pickled if len(pickled) <= MOST_BYTES else b""
    except BaseException:  # pickling runs code of the user's class
        return b""


def unpack_error(packed: PackedError) -> Failure:
    """Unpack an error; runs the user's code."""
    exception = None
    try:
        exception = cloudpickle.loads(packed.pickled)
    except BaseException:  # its module may exit, its class not exist or not take its arguments
        pass
    is_error = issubclass(type(exception), BaseException)
    return Failure(packed.summary, packed.frames, exception if is_error else None)
