"""How an error of a rank travels: what a person needs of it, and itself where it can be pickled."""

from __future__ import annotations

import linecache
import os
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

from nbelastic.pickling import dumps

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Failure", "pack_error", "unpack_error"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True)
class Frame:
    """One line of a traceback."""

    file: str
    line: int
    function: str
    text: str


@dataclass(frozen=True)
class Failure:
    """An error as it arrived.

    Attributes
    ----------
    summary : str
        Type and message in one line.
    frames : tuple of Frame
        The user's own lines, the outermost first; all lines if none is the user's.
    exception : BaseException or None
        The error itself, where it could be pickled there and unpickled here.
    """

    summary: str
    frames: tuple[Frame, ...]
    exception: BaseException | None

    def where(self, label: Callable[[str], str | None] = lambda _: None) -> str:
        """Return the user's lines, as a traceback shows them.

        Parameters
        ----------
        label : callable
            What a file is better called here, or None.
        """
        lines = []
        for frame in self.frames:
            place = label(frame.file) or f'File "{frame.file}"'
            lines.append(f"  {place}, line {frame.line}, in {frame.function}")
            text = frame.text or linecache.getline(frame.file, frame.line).strip()
            if text:
                lines.append(f"    {text}")
        return "\n".join(lines)


def pack_error(error: BaseException) -> dict[str, Any]:
    """Write an error as a dict of plain values."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    try:
        pickled = dumps(error.with_traceback(None))
    except Exception:  # whatever a user's exception raises when pickled
        pickled = b""
    return {
        "summary": "".join(traceback.format_exception_only(type(error), error)).strip(),
        "frames": [[f.filename, f.lineno or 0, f.name, f.line or ""] for f in own or frames],
        "pickled": pickled,
    }


def unpack_error(data: dict[str, Any]) -> Failure:
    """Read :func:`pack_error`'s dict."""
    exception: BaseException | None = None
    if data["pickled"]:
        try:
            exception = cloudpickle.loads(data["pickled"])
        except Exception:  # its class may not exist here, or not take its own arguments
            exception = None
    return Failure(
        summary=data["summary"],
        frames=tuple(Frame(*frame) for frame in data["frames"]),
        exception=exception if isinstance(exception, BaseException) else None,
    )
