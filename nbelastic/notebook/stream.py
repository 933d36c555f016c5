"""What ranks print, made into text for one reader.

Pure: outputs in, text out; the clock is handed in. Lines are never torn: each rank's unfinished
line waits for its end. Where many ranks print the same line at about the same time, it comes once,
with all their numbers. A flood is cut, with a word on where the rest is: nothing is lost from
``job.logs()``.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Spoken", "Streamer"]

Mode = Literal["rank0", "all", "none"]

TOGETHER_S = 0.25
"""Equal lines that come within this time are one."""

LONGEST = 4_000
"""Characters of one line."""

TAIL = 10
"""Lines shown from the end of what was cut."""


class Spoken(Protocol):
    """What a rank has printed: ``nbelastic.driver``'s ``Output``."""

    @property
    def start(self) -> int:
        """Which start of the function it was."""

    @property
    def rank(self) -> int | None:
        """Its rank at that time."""

    @property
    def text(self) -> str:
        """What it printed, lines whole or not."""


@dataclass
class _Line:
    """A line, and who has printed it: by start, the rank or None."""

    text: str
    since: float
    speakers: dict[int, int | None] = field(default_factory=dict)

    @property
    def who(self) -> str:
        ranks = sorted({rank for rank in self.speakers.values() if rank is not None})
        starts = sorted(start for start, rank in self.speakers.items() if rank is None)
        names = [f"{'rank' if len(ranks) == 1 else 'ranks'} {_ranges(ranks)}"] if ranks else []
        names += [f"start {_ranges(starts)}"] if starts else []
        return ", ".join(names)


class Streamer:
    """Turns the outputs of ranks into text.

    Parameters
    ----------
    mode : {"rank0", "all", "none"}, default "rank0"
        Whose output is shown. With "all", ``[rank 3]`` stands before a line where the speaker
        changes.
    clock : callable, optional
        Returns seconds.
    lines_per_s : float or None, default 200
        Most lines in the long run; None for no cap.
    burst : int, default 1000
        Most lines at once.
    """

    def __init__(
        self,
        mode: Mode = "rank0",
        clock: Callable[[], float] = time.monotonic,
        *,
        lines_per_s: float | None = 200.0,
        burst: int = 1_000,
    ) -> None:
        self._mode = mode
        self._clock = clock
        self._cap = None if lines_per_s is None else _Cap(lines_per_s, burst, clock())
        self._queue = _Queue()
        self._parts: dict[int, tuple[int | None, str]] = {}
        self._tail: deque[_Line] = deque(maxlen=TAIL)
        self._dropped = 0
        self._speaker = ""
        self._open = -1  # the start whose unfinished line stands at the end of the text

    def feed(self, outputs: Iterable[Spoken]) -> str:
        """Take what was printed, possibly nothing; return what to show now.

        Parameters
        ----------
        outputs : iterable of Spoken
            In the order in which it came. Call it now and then without any: lines wait a moment
            for their like.
        """
        now = self._clock()
        if self._mode == "none":
            return ""
        due = now - (TOGETHER_S if self._mode == "all" else 0.0)
        shown = [self._emit(now, due), *(self._take(each, now) for each in outputs)]
        return "".join(shown) + self._emit(now, due)

    def flush(self) -> str:
        """Return everything that still waits, unfinished lines as well."""
        now = self._clock()
        for start, (rank, text) in sorted(self._parts.items()):
            if text and start != self._open:
                self._queue.add(_visible(text), start, rank, now)
        self._parts.clear()
        end = self._end_open_line()
        return end + self._emit(now, now) + self._report_dropped()

    # -- in ------------------------------------------------------------------------------------

    def _take(self, output: Spoken, now: float) -> str:
        """Queue the whole lines of an output; return what of a progress bar can be shown."""
        if self._mode == "rank0" and output.rank != 0:
            return ""
        start, rank = output.start, output.rank
        _, before = self._parts.get(start, (rank, ""))
        *lines, rest = (before + output.text).replace("\r\n", "\n").split("\n")
        shown = ""
        if lines and start == self._open:
            shown = self._bar(lines.pop(0)) + "\n"
            self._open = -1
        for line in lines:
            self._queue.add(_visible(line), start, rank, now)
        if "\r" in rest:
            rest = f"\r{_visible(rest)}" + ("\r" if rest.endswith("\r") else "")
        self._parts[start] = (rank, rest)
        if rank == 0 and _visible(rest) and "\r" in rest:
            shown += self._update_bar(start, rest, now)
        return shown

    def _update_bar(self, start: int, text: str, now: float) -> str:
        if start != self._open:
            before = self._end_open_line() + self._emit(now, now)
            self._open = start
            return before + self._bar(text)
        return self._bar(text)

    def _bar(self, text: str) -> str:
        """Return the last state of a progress bar, such that it overwrites the one before."""
        self._speaker = "rank 0"
        prefix = "[rank 0] " if self._mode == "all" else ""
        return f"\r{prefix}{_visible(text)}"

    def _end_open_line(self) -> str:
        if self._open < 0:
            return ""
        self._open = -1
        return "\n"

    # -- out -----------------------------------------------------------------------------------

    def _emit(self, now: float, until: float) -> str:
        shown = []
        for line in self._queue.take(until):
            if self._cap is not None and not self._cap.allows(now):
                self._dropped += 1
                self._tail.append(line)
                continue
            shown.append(self._report_dropped() + self._show(line))
        return "".join(shown)

    def _report_dropped(self) -> str:
        """Say how much was cut, and show its last lines."""
        cut = self._dropped - len(self._tail)
        word = ""
        if cut > 0:
            self._speaker = ""
            what = "line" if cut == 1 else "lines"
            word = f"{self._end_open_line()}… {cut:,} {what} more: job.logs()\n"
        tail, self._tail, self._dropped = tuple(self._tail), deque(maxlen=TAIL), 0
        return word + "".join(map(self._show, tail))

    def _show(self, line: _Line) -> str:
        text = line.text
        if len(text) > LONGEST:
            text = f"{text[:LONGEST]} … {len(text) - LONGEST:,} characters more: job.logs()"
        who = line.who
        prefix = f"[{who}] " if self._mode == "all" and who != self._speaker else ""
        self._speaker = who
        return f"{self._end_open_line()}{prefix}{text}\n"


class _Queue:
    """Lines that wait for their like; each rank's stay in order."""

    def __init__(self) -> None:
        self._lines: deque[_Line] = deque()
        self._first = 0  # number of the first line; numbers only grow
        self._with_text: dict[str, list[int]] = {}
        self._last_of: dict[int, int] = {}

    def add(self, text: str, start: int, rank: int | None, now: float) -> None:
        """Join an equal line after this rank's last one, or stand at the end."""
        equal = self._with_text.setdefault(text, [])
        after = max(self._last_of.get(start, -1), self._first - 1)
        place = bisect.bisect_right(equal, after)
        if place == len(equal):
            equal.append(self._first + len(self._lines))
            self._lines.append(_Line(text, now))
        number = equal[place]
        self._lines[number - self._first].speakers[start] = rank
        self._last_of[start] = number

    def take(self, until: float) -> list[_Line]:
        """Remove and return the lines that have waited since `until` or longer."""
        taken = []
        while self._lines and self._lines[0].since <= until:
            line = self._lines.popleft()
            taken.append(line)
            self._first += 1
            equal = self._with_text[line.text]
            equal.pop(0)
            if not equal:
                del self._with_text[line.text]
        return taken


class _Cap:
    """A token bucket; once empty, it waits until a second's worth is there again."""

    def __init__(self, rate: float, burst: int, now: float) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._tokens = float(burst)
        self._at = now
        self._resume = min(rate, self._burst)
        self._closed = False

    def allows(self, now: float) -> bool:
        """Return whether one more line may be shown."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._closed and self._tokens < self._resume:
            return False
        self._closed = self._tokens < 1
        if not self._closed:
            self._tokens -= 1
        return not self._closed


def _visible(text: str) -> str:
    """Return what a terminal would show of a line that overwrites itself."""
    return text.rstrip("\r").rpartition("\r")[2] if "\r" in text else text


def _ranges(numbers: list[int]) -> str:
    """Write ``[0, 1, 2, 5]`` as ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
