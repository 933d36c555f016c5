"""How a job shows itself: a panel in a notebook, a line in a terminal.

:class:`NotebookDisplay` is what the driver calls when a job is made, waited for, or is the value of
a cell. Three representations are published of each job: the live widget, static HTML, and one
line of text.

Who does what, and in which thread:

* A display is made in the thread that asks for it, the kernel's main thread. No other thread ever
  prints or makes one: in which cell that would land differs between versions of ipykernel.
* While a cell waits for a job, the main thread itself refreshes the panel and writes what the ranks
  print (``tick``). Nothing else runs.
* A job that is shown while nobody waits for it has a thread, ``nbelastic-panel-NAME``. It changes
  traits of the widget and updates displays by their id, both of which are safe in any thread. It
  waits for the job with a bound and ends with it.
* The thread of an earlier display and a main thread that waits may meet at one job's
  :class:`View`; its lock makes the end happen once.

At the end every display of the job is replaced by its final HTML, without the widget: the state of
widgets is not saved in a notebook, and where a widget is offered but cannot be drawn, JupyterLab
and nbconvert show nothing instead of the HTML beside it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from .render import Picture, text
from .stream import Streamer
from .terminal import LastLine, Printing, TerminalWatch
from .view import IPythonScreen, View, bundle
from .watch import Manner, NotebookWatch, SilentWatch, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from nbelastic.driver.display import Watch

    from .stream import Mode
    from .view import Screen

__all__ = [
    "Manner",
    "NotebookDisplay",
    "bundle",
    "close",
    "kernel_shell",
    "label",
    "say",
    "set_manner",
    "show",
    "started",
    "watching",
]

MOST_MANNERS = 64


def kernel_shell() -> Any:
    """Return the shell of the IPython kernel that this process is, or None if it is none."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


class NotebookDisplay:
    """Shows the jobs of this process; the driver calls it.

    Parameters
    ----------
    screen : Screen, optional
        Where displays go; IPython's own if not given.
    shell : callable
        Returns the kernel's shell, or None where there is none.
    clock : callable
        The time in seconds.
    """

    def __init__(
        self,
        screen: Screen | None = None,
        shell: Callable[[], Any] = kernel_shell,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._screen: Screen = IPythonScreen() if screen is None else screen
        self._shell = shell
        self._clock = clock
        self._lock = threading.Lock()
        self._manners: OrderedDict[str, Manner] = OrderedDict()
        self._views: dict[int, View] = {}
        self._printings: WeakKeyDictionary[Any, Printing] = WeakKeyDictionary()
        self._told: WeakKeyDictionary[Any, object] = WeakKeyDictionary()

    # -- for the driver ------------------------------------------------------------------------

    def started(self, job: Any) -> None:
        """Take note of a new job: there is nothing to show before somebody waits for it."""

    def watching(self, job: Any) -> AbstractContextManager[Watch]:
        """Return what shows a job while the main thread waits for it."""
        if threading.current_thread() is not threading.main_thread():
            return SilentWatch()  # where it would print, and whether it may, nobody can say
        manner = self._manners.get(job.name, Manner())
        shell = self._shell()
        told = partial(self._note, job, shell)
        if _noninteractive():
            stream = (lambda: sys.stdout) if shell is not None else (lambda: sys.stderr)
            return LastLine(job, stream, manner.quiet, told)
        printing = self._printing(job, manner.stream)
        if shell is None:
            return TerminalWatch(job, printing, manner.quiet, self._clock)
        return NotebookWatch(job, partial(self._view, job), printing, manner, self._clock, told)

    def show(self, job: Any) -> None:
        """Show a job as the value of a cell, to its end.

        The cell that has just waited for the job shows it already, and shows it once.
        """
        shell = self._shell()
        if shell is None:
            write(text(Picture.of(job)) + "\n")
        elif self._told.get(job) == _cell(shell) and job.done():
            return
        elif _noninteractive():
            self._screen.publish({"text/plain": text(Picture.of(job))}, uuid.uuid4().hex)
        elif job.done():
            self._screen.publish(bundle(job), uuid.uuid4().hex)
        else:
            view = self._view(job)
            view.publish()
            view.follow()

    def say(self, text: str) -> None:
        """Show one line that belongs to no job, where there is somebody to read it."""
        if threading.current_thread() is threading.main_thread() and not _noninteractive():
            stream = sys.stderr if self._shell() is None else sys.stdout
            stream.write(text + "\n")
            stream.flush()

    def label(self, file: str) -> str | None:
        """Return what IPython calls the cell that a file of source code is, or None."""
        shell = self._shell()
        name = None if shell is None else shell.compile.format_code_name(file)
        return None if name is None else " ".join(name)

    # -- for the magics ------------------------------------------------------------------------

    def set_manner(self, name: str, manner: Manner) -> None:
        """Say how the job of a name is to be shown; the newest 64 are kept."""
        self._manners.pop(name, None)
        self._manners[name] = manner
        while len(self._manners) > MOST_MANNERS:
            self._manners.popitem(last=False)

    def close(self, timeout: float = 1.0) -> None:
        """End every thread; what they show stays as it is."""
        with self._lock:
            views = list(self._views.values())
        for view in views:
            view.close(timeout)

    # -- one of each per job -------------------------------------------------------------------

    def _view(self, job: Any) -> View:
        """Return the view that shows a job, a new one if there is none, or if its own is over."""
        key = id(job)  # the view holds the job, so that no other can have its id meanwhile
        with self._lock:
            if key not in self._views:
                view = View(job, self._screen, self._clock, lambda: self._forget(key))
                self._views[key] = view
            return self._views[key]

    def _forget(self, key: int) -> None:
        with self._lock:
            self._views.pop(key, None)

    def _printing(self, job: Any, mode: Mode) -> Printing:
        """Return what writes a job's output: one per job, so that no line comes twice."""
        if job not in self._printings:
            self._printings[job] = Printing(Streamer(mode))
        return self._printings[job]

    def _note(self, job: Any, shell: Any) -> None:
        self._told[job] = _cell(shell)


def _noninteractive() -> bool:
    return os.environ.get("NBELASTIC_NONINTERACTIVE") == "1"


def _cell(shell: Any) -> object:
    """Return what tells one execution of a cell from another."""
    return getattr(shell, "execution_count", None)


# The display of this process: the driver is given this module.

_display = NotebookDisplay()
started = _display.started
watching = _display.watching
show = _display.show
say = _display.say
label = _display.label
set_manner = _display.set_manner
close = _display.close
