"""Output of ranks as text for one reader.

Lines are never torn: each rank's unfinished line waits for its end. A flood is cut, with a hint at
``job.logs()``, which keeps everything. The output and the clock are arguments; nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

from nbelastic.driver import Output

from .formatting import count

Mode = Literal["rank0", "all", "none"]

MAX_LINE = 4_000  # characters shown of one line
MAX_UNFINISHED = 1_000_000  # characters after which an unfinished line counts as finished
BURST = 1_000  # lines shown at once; in the long run `LINES_PER_S`
LINES_PER_S = 200.0


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
        self._tokens, self._filled = float(BURST), clock()  # a token bucket, in lines
        self._dropped = 0  # lines since the last one that was shown
        self._cursor = 0  # in the output of the job
        self._lines = RankLines()
        self._source = ""  # of the last line
        self._bar = -1  # the start whose progress bar is at the end of the text

    def new_text(self, job: Any) -> str:
        """Return the text for what the ranks of a job have printed since the last call."""
        self._cursor, outputs = job.output(self._cursor)
        return self.feed(outputs)

    def feed(self, outputs: Iterable[Output]) -> str:
        """Take new output in order of arrival; return the text to show now."""
        every = self._mode == "all"
        shown = (each for each in outputs if every or (self._mode == "rank0" and each.rank == 0))
        return "".join(map(self._take, shown))

    def flush(self) -> str:
        """Return all unfinished lines."""
        rest = [each for each in self._lines.rest() if each[0] != self._bar]
        return "".join(self._show(*each) for each in rest) + self._end_bar() + self._end_flood()

    def _take(self, output: Output) -> str:
        """Return the whole lines of an output, and the progress bar in it, if any."""
        start, rank = output.start, output.rank
        lines = self._lines.take(output)
        shown = ""
        if lines and start == self._bar:
            shown = self._draw_bar(lines.pop(0)) + self._end_bar()
        shown += "".join(self._show(start, rank, line) for line in lines)
        rest = self._lines.unfinished(start)
        if rank == 0 and visible(rest) and "\r" in rest:
            if start != self._bar:
                shown += self._end_bar()
                self._bar = start
            shown += self._draw_bar(rest)
        return shown

    def _draw_bar(self, text: str) -> str:
        """Return the last state of a progress bar, to overwrite the state before."""
        self._source = "rank 0"
        prefix = "[rank 0] " if self._mode == "all" else ""
        return f"\r{prefix}{visible(text)}"

    def _end_bar(self) -> str:
        end = "\n" if self._bar >= 0 else ""
        self._bar = -1
        return end

    def _show(self, start: int, rank: int | None, text: str) -> str:
        """Return a line with its source, unless it is one too many."""
        now = self._clock()
        self._tokens = min(BURST, self._tokens + (now - self._filled) * LINES_PER_S)
        self._filled = now
        # An empty bucket stays closed until a second's worth has come back.
        if self._tokens < (LINES_PER_S if self._dropped else 1):
            self._dropped += 1
            return ""
        self._tokens -= 1
        above = self._end_bar() + self._end_flood()
        if len(text) > MAX_LINE:
            text = f"{text[:MAX_LINE]} … {len(text) - MAX_LINE:,} characters more: job.logs()"
        source = f"start {start}" if rank is None else f"rank {rank}"
        prefix = f"[{source}] " if self._mode == "all" and source != self._source else ""
        self._source = source
        return f"{above}{prefix}{text}\n"

    def _end_flood(self) -> str:
        if not self._dropped:
            return ""
        words = f"… {count(self._dropped, 'line')} more: job.logs()\n"
        self._dropped, self._source = 0, ""
        return words


def visible(text: str) -> str:
    """Return the visible part of a line that overwrites itself."""
    return text.rstrip("\r").rpartition("\r")[2] if "\r" in text else text
