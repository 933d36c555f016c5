"""Output of ranks as text for one reader.

Lines are never torn: each rank's unfinished line waits for its end. A line that many ranks print at
about the same time is shown once, with all their numbers. A flood is cut, with a hint at
``job.logs()``, which keeps everything. The output and the clock are arguments; nothing is written.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from nbelastic.driver import Output

from .formatting import count

Mode = Literal["rank0", "all", "none"]

TOGETHER_S = 0.25  # equal lines within this time are shown as one
MAX_LINE = 4_000  # characters shown of one line
MAX_UNFINISHED = 1_000_000  # characters after which an unfinished line counts as finished
BURST = 1_000  # lines shown at once; in the long run `LINES_PER_S`
LINES_PER_S = 200.0
TAIL = 10  # lines shown from the end of a cut


@dataclass
class _Line:
    """A line, and the printing starts, each with its rank or None."""

    text: str
    since: float
    printers: dict[int, int | None] = field(default_factory=dict)

    @property
    def source(self) -> str:
        ranks = sorted({rank for rank in self.printers.values() if rank is not None})
        starts = sorted(start for start, rank in self.printers.items() if rank is None)
        names = [f"{'rank' if len(ranks) == 1 else 'ranks'} {_ranges(ranks)}"] if ranks else []
        names += [f"start {_ranges(starts)}"] if starts else []
        return ", ".join(names)


class RankLines:
    """Joins pieces of output to lines; of a progress bar its last state is kept."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[int | None, str]] = {}

    def take(self, output: Output) -> list[str]:
        """Return the lines of a rank that are whole now."""
        text = self.unfinished(output.start) + output.text
        *lines, rest = text.replace("\r\n", "\n").split("\n")
        if "\r" in rest:  # a trailing one may be half of a line's end: the next piece tells
            rest = f"\r{visible(rest)}" + ("\r" if rest.endswith("\r") else "")
        elif len(rest) > MAX_UNFINISHED:
            lines.append(rest)
            rest = ""
        self._open[output.start] = (output.rank, rest)
        return list(map(visible, lines))

    def unfinished(self, start: int) -> str:
        """Return the line of a start that has not ended; of a progress bar with its returns."""
        return self._open.get(start, (None, ""))[1]

    def rest(self) -> list[tuple[int, int | None, str]]:
        """End the unfinished lines; return start, rank and text of each."""
        found = [(start, rank, visible(text)) for start, (rank, text) in sorted(self._open.items())]
        self._open.clear()
        return [each for each in found if each[2]]


class Streamer:
    """Turns outputs of ranks into text, with ``[rank 3]`` where the rank changes."""

    def __init__(self, mode: Mode = "rank0", clock: Callable[[], float] = time.monotonic) -> None:
        self._mode = mode
        self._clock = clock
        self._cap = _Cap(clock())
        self._queue = _Queue()
        self._cursor = 0  # in the output of the job
        self._lines = RankLines()
        self._tail: deque[_Line] = deque(maxlen=TAIL)
        self._dropped = 0
        self._source = ""
        self._open = -1  # the start whose unfinished line is at the end of the text

    def new_text(self, job: Any) -> str:
        """Return the text for what the ranks of a job have printed since the last call."""
        self._cursor, outputs = job.output(self._cursor)
        return self.feed(outputs)

    def feed(self, outputs: Iterable[Output]) -> str:
        """Take new output in order of arrival, possibly none; return the text to show now."""
        now = self._clock()
        if self._mode == "none":
            return ""
        due = now - (TOGETHER_S if self._mode == "all" else 0.0)
        shown = [self._emit(now, due), *(self._take(each, now) for each in outputs)]
        return "".join(shown) + self._emit(now, due)

    def flush(self) -> str:
        """Return all waiting lines, unfinished ones included."""
        now = self._clock()
        for start, rank, text in self._lines.rest():
            if start != self._open:
                self._queue.add(text, start, rank, now)
        end = self._end_open_line()
        return end + self._emit(now, now) + self._report_dropped()

    # -- in ------------------------------------------------------------------------------------

    def _take(self, output: Output, now: float) -> str:
        """Queue the whole lines of an output; return the progress bar in it, if any."""
        if self._mode == "rank0" and output.rank != 0:
            return ""
        start, rank = output.start, output.rank
        lines = self._lines.take(output)
        shown = ""
        if lines and start == self._open:
            shown = self._bar(lines.pop(0)) + "\n"
            self._open = -1
        for line in lines:
            self._queue.add(line, start, rank, now)
        rest = self._lines.unfinished(start)
        if rank == 0 and visible(rest) and "\r" in rest:
            if start != self._open:
                shown += self._end_open_line() + self._emit(now, now)
                self._open = start
            shown += self._bar(rest)
        return shown

    def _bar(self, text: str) -> str:
        """Return the last state of a progress bar, to overwrite the state before."""
        self._source = "rank 0"
        prefix = "[rank 0] " if self._mode == "all" else ""
        return f"\r{prefix}{visible(text)}"

    def _end_open_line(self) -> str:
        if self._open < 0:
            return ""
        self._open = -1
        return "\n"

    # -- out -----------------------------------------------------------------------------------

    def _emit(self, now: float, until: float) -> str:
        shown = []
        for line in self._queue.take(until):
            if self._cap.allows(now):
                shown.append(self._report_dropped() + self._show(line))
            else:
                self._dropped += 1
                self._tail.append(line)
        return "".join(shown)

    def _report_dropped(self) -> str:
        """Return the number of omitted lines in words, and the last omitted lines themselves."""
        cut = self._dropped - len(self._tail)
        word = ""
        if cut > 0:
            self._source = ""
            word = f"{self._end_open_line()}… {count(cut, 'line')} more: job.logs()\n"
        tail, self._tail, self._dropped = tuple(self._tail), deque(maxlen=TAIL), 0
        return word + "".join(map(self._show, tail))

    def _show(self, line: _Line) -> str:
        text = line.text
        if len(text) > MAX_LINE:
            text = f"{text[:MAX_LINE]} … {len(text) - MAX_LINE:,} characters more: job.logs()"
        source = line.source
        prefix = f"[{source}] " if self._mode == "all" and source != self._source else ""
        self._source = source
        return f"{self._end_open_line()}{prefix}{text}\n"


class _Queue:
    """Lines that wait for equal ones; each rank's stay in order."""

    def __init__(self) -> None:
        self._lines: deque[_Line] = deque()
        self._first = 0  # number of the first line; numbers only grow
        self._with_text: dict[str, list[int]] = {}
        self._last_of: dict[int, int] = {}

    def add(self, text: str, start: int, rank: int | None, now: float) -> None:
        """Merge with an equal line after this rank's last one, or append."""
        equal = self._with_text.setdefault(text, [])
        after = max(self._last_of.get(start, -1), self._first - 1)
        place = bisect.bisect_right(equal, after)
        if place == len(equal):
            equal.append(self._first + len(self._lines))
            self._lines.append(_Line(text, now))
        number = equal[place]
        self._lines[number - self._first].printers[start] = rank
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
    """A token bucket; an empty bucket stays closed until a second's worth has come back."""

    def __init__(self, now: float) -> None:
        self._tokens = float(BURST)
        self._at = now
        self._closed = False

    def allows(self, now: float) -> bool:
        """Return whether one more line may be shown."""
        self._tokens = min(BURST, self._tokens + (now - self._at) * LINES_PER_S)
        self._at = now
        self._closed = self._tokens < (LINES_PER_S if self._closed else 1)
        if not self._closed:
            self._tokens -= 1
        return not self._closed


def visible(text: str) -> str:
    """Return the visible part of a line that overwrites itself."""
    return text.rstrip("\r").rpartition("\r")[2] if "\r" in text else text


def _ranges(numbers: list[int]) -> str:
    groups = itertools.groupby(enumerate(numbers), key=lambda each: each[1] - each[0])
    runs = [[number for _, number in run] for _, run in groups]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
