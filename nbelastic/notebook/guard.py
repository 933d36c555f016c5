"""A fault in what is displayed must not harm a job: it is logged once, and the display goes off."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

__all__ = ["Guard", "GuardedWatch"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Guard:
    """Calls what belongs to the display of one job, until it fails.

    Parameters
    ----------
    what : str
        What is guarded, for the log.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.broken = False

    def __call__(self, function: Callable[[], T], default: T) -> T:
        """Return ``function()``; `default` if it raises, or if something has raised before."""
        if self.broken:
            return default
        try:
            return function()
        except Exception:  # whatever it is: the display ends here, and the job goes on
            self.broken = True
            logger.warning(
                "the display of %s failed and is switched off", self._what, exc_info=True
            )
            return default


class GuardedWatch:
    """What all watches share: whatever they raise is logged once, and never reaches the job.

    Parameters
    ----------
    job : Job
        What to watch.
    """

    def __init__(self, job: Any) -> None:
        self._job = job
        self._guard = Guard(f"job {job.name!r}")

    def __enter__(self) -> Self:
        self._guard(self._begin, None)
        return self

    def __exit__(self, *_: object) -> None:
        self._guard(self._end, None)

    def tick(self) -> None:
        """Bring what is shown up to date. Called in the main thread."""
        self._guard(self._tick, None)

    def say(self, text: str) -> None:
        """Show one line to the user."""
        self._guard(lambda: self._say(text), None)

    def _begin(self) -> None:
        """Begin to watch."""

    def _tick(self) -> None:
        """Look once."""

    def _say(self, text: str) -> None:
        """Write a line."""

    def _end(self) -> None:
        """Leave what is shown as it is to stay."""
