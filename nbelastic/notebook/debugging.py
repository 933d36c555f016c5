"""``%debug`` after a rank's failure, whose frames are not in the kernel."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from nbelastic.errors import RankFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

NOTHING_HERE = (
    "The error was raised in a rank, which has ended; %debug can only inspect the kernel.\n"
    "To debug the function, call it in a cell without fit, or run the cell without its first line "
    "(%%elastic_train): there it runs as a single rank. Then use %debug again."
)

_MARK = "_nbelastic_original"


def wrap_debug(shell: InteractiveShell) -> None:
    """Make ``%debug`` explain itself if the last error was a rank's."""
    original = _find(shell)
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def debug(line: str = "", *args: Any, **kwargs: Any) -> Any:
        if line.strip() or not isinstance(getattr(sys, "last_value", None), RankFailed):
            return original(line, *args, **kwargs)
        sys.stdout.write(NOTHING_HERE + "\n")
        return None

    setattr(debug, _MARK, original)
    shell.magics_manager.magics["line"]["debug"] = debug


def unwrap_debug(shell: InteractiveShell) -> None:
    """Restore the original."""
    original = getattr(_find(shell), _MARK, None)
    if original is not None:
        shell.magics_manager.magics["line"]["debug"] = original


def _find(shell: Any) -> Callable[..., Any] | None:
    magic: Callable[..., Any] | None = shell.find_line_magic("debug")  # may import it
    return magic
