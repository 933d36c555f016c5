"""A stage for displays: screen, time and cell are the test's."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

from nbelastic.notebook.display_group import AFTER
from nbelastic.notebook.display_service import DisplayService

LINE = "nbelastic job quickstart: finished · 4 ranks · 2 resets · 120 commits"


class Screen:
    """Keeps the latest of every display, and counts."""

    def __init__(self) -> None:
        self.displays: dict[str, dict] = {}
        self.updates: list[dict] = []
        self.after: dict[str, str] = {}  # the lines under widgets
        self.makers: list[threading.Thread] = []

    def publish(self, data, display_id, *, update=False):
        if display_id.endswith(AFTER):
            assert (display_id in self.after) == update
            self.after[display_id] = data["text/html"]
            return
        assert (display_id in self.displays) == update
        self.displays[display_id] = data
        if update:
            self.updates.append(data)
        else:
            self.makers.append(threading.current_thread())

    @property
    def shown(self) -> list[dict]:
        return list(self.displays.values())


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """A display without a kernel, whose time and cell the test sets."""

    def __init__(self) -> None:
        self.screen, self.clock = Screen(), Clock()
        self.shell = SimpleNamespace(kernel=object(), execution_count=1)
        self.display = DisplayService(self.screen.publish, lambda: self.shell, self.clock)


def until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.005)
