"""Interface to the display of jobs.

The notebook's display is the default. It is named here and imported with the first job; a command
or a test sets another one. Without one, nothing is shown. Errors of a display are logged, once, and
never reach the job.

A display has ``show(job)``, ``say(line)``, ``label(file)`` with the user's name of a source file,
such as ``Cell In[5]``, or None, and ``watching(job)``: a context manager for the thread that waits
for a job, with ``tick()``, called ten times a second, and ``say(line)``; or None to show nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

logger = logging.getLogger(__name__)


class _NotebookDisplay:
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("nbelastic.notebook.display_service").display, name)


_display: Any = _NotebookDisplay()

_NOTHING = object()  # result of a call without a display, or of a call that has failed


def set_display(display: Any) -> None:
    """Set this process's display of jobs."""
    global _display  # noqa: PLW0603 - one display per process
    _display = display


def show(job: Any) -> bool:
    """Show a job; return whether a display has shown it."""
    return _call(_display, "show", job) is not _NOTHING


def say(text: str) -> None:
    """Show a line that concerns no job."""
    _call(_display, "say", text)


def label(file: str) -> str | None:
    """Return the user's name of a source file, or None."""
    name = _call(_display, "label", file)
    return name if isinstance(name, str) else None


@contextlib.contextmanager
def watching(job: Any) -> Iterator[Any]:
    """Yield the wait display of a job, or none, with its errors caught."""
    manager = _call(_display, "watching", job)
    watch = _call(manager, "__enter__")
    try:
        calls = {name: functools.partial(_call, watch, name) for name in ("tick", "say")}
        yield SimpleNamespace(**calls)
    finally:
        if watch is not _NOTHING:
            _call(manager, "__exit__", None, None, None)


def _call(target: object, method: str, *arguments: object) -> Any:
    """Call a method of a display, if there is one. Its errors must not reach the job."""
    if target is None or target is _NOTHING:
        return _NOTHING
    try:
        return getattr(target, method)(*arguments)
    except Exception:
        _complain()
        return _NOTHING


@functools.cache  # once per process
def _complain() -> None:
    logger.warning("the display of jobs failed; jobs go on", exc_info=True)
