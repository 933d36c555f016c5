"""A fault in what is displayed must not harm a job: it is logged once, and the display goes off."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Guard"]

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
