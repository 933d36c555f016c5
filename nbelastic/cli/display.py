"""The command's display of jobs, called by the thread that waits for the job."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbelastic.driver import HistoryEvent, Job, Output
from nbelastic.render import JobSnapshot, RankLines, printable, sentence, text


@dataclass(frozen=True)
class ViewOptions:
    """How to show a job."""

    style: str = "plain"  # ``live``, ``plain``, ``json`` or ``quiet``
    prefix: bool = False  # output of all ranks, each line with its rank
    directory: str | None = None  # where to write the output of each rank


class CommandDisplay:
    """Shows the jobs of a command."""

    def __init__(self, options: ViewOptions) -> None:
        self._options = options
        self._messages: deque[str] = deque()

    def watching(self, job: Job) -> WaitView:
        """Return the view of a job."""
        if self._options.style == "live":
            from .live import LiveView

            return LiveView(job, self._options, self._messages)
        kind = JsonView if self._options.style == "json" else WaitView
        return kind(job, self._options, self._messages)

    def show(self, job: Job) -> None:
        """Do nothing: a command has no values to show."""

    def say(self, text: str) -> None:
        """Show a line that concerns no job."""
        _say(text)

    def tell(self, text: str) -> None:
        """Show a line, once a view is open. Any thread may call this."""
        self._messages.append(text)

    def flush(self) -> None:
        """Write the lines that no view has shown."""
        while self._messages:
            _say(self._messages.popleft())

    def label(self, file: str) -> str | None:
        """Return None: files have no other names here."""
        return None


class WaitView:
    """A line on stderr for each event, and output of ranks on stdout."""

    def __init__(self, job: Any, options: ViewOptions, messages: deque[str]) -> None:
        self.job = job
        self.options = options
        self._messages = messages
        self._cursor = 0
        self._events = 0
        self._lines = RankLines()
        self._directory = options.directory

    def __enter__(self) -> WaitView:
        return self

    def __exit__(self, *_: object) -> None:
        self.tick(last=True)
        if self.job.done():
            self.write_end()

    def tick(self, last: bool = False) -> None:
        """Write what is new; at last also lines of ranks that have not ended."""
        self._cursor, outputs = self.job.output(self._cursor)
        self._save(outputs)
        for output in outputs:
            if output.rank == 0 or self.options.prefix:
                for line in self._lines.take(output):
                    self.write_line(output.rank, line)
        for _, rank, line in self._lines.rest() if last else ():
            self.write_line(rank, line)
        history = self.job.history
        if len(history) < self._events:  # taken over again: the history is the scheduler's now
            self._events = 0
        new, self._events = history[self._events :], len(history)
        for event in new:
            self.write_event(event)
        while self._messages:
            self.say(self._messages.popleft())

    def _save(self, outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            if self._directory is None:
                return
            number = "unknown" if output.rank is None else output.rank
            place = Path(self._directory) / f"rank.{number}"
            try:
                place.mkdir(parents=True, exist_ok=True)
                with open(place / "stdout", "a", encoding="utf-8", errors="backslashreplace") as f:
                    f.write(output.text)
            except OSError as error:
                self._directory = None
                self.say(f"--output-filename: {error}")

    def prefixed(self, rank: int | None, line: str) -> str:
        """Return a line, prefixed with its rank as by horovodrun if so set."""
        number = "–" if rank is None else rank
        return f"[{number}]<stdout>: {line}" if self.options.prefix else line

    # -- what a style writes ---------------------------------------------------------------------

    def write_line(self, rank: int | None, line: str) -> None:
        """Write a line of a rank to stdout."""
        _write(sys.stdout, self.prefixed(rank, line))

    def write_event(self, event: HistoryEvent) -> None:
        """Write an event."""
        words = sentence(JobSnapshot(self.job.status, (), self.job.started), event)
        if words and self.options.style != "quiet":
            _say(words)

    def say(self, text: str) -> None:
        """Write a line that is no event."""
        _say(text)

    def write_end(self) -> None:
        """Write the end of the job."""
        if self.options.style != "quiet":
            _say(text(JobSnapshot.of(self.job)))


class JsonView(WaitView):
    """A JSON object in a line of stdout for each event, output and message."""

    def write_line(self, rank: int | None, line: str) -> None:
        _write_json("output", rank=rank, text=line)

    def write_event(self, event: HistoryEvent) -> None:
        _write_json("event", **dataclasses.asdict(event))

    def say(self, text: str) -> None:
        _write_json("message", time=time.time(), text=text)

    def write_end(self) -> None:
        status = self.job.status
        names = ("name", "state", "size", "resets", "commits", "elapsed")
        facts = {name: getattr(status, name) for name in names}
        _write_json("end", **facts, data=[dataclasses.asdict(each) for each in status.data])


write_errors: list[str] = []  # streams that could not take what was written, with the error


def _write_json(kind: str, /, **facts: Any) -> None:
    _write(sys.stdout, json.dumps({"type": kind, **facts}, default=str))


def _say(words: str) -> None:
    """Write words for the user, which may have been made elsewhere, to stderr."""
    _write(sys.stderr, str(printable(words)))


def _write(stream: Any, line: str) -> None:
    """Write a line; a stream that is closed, or whose reader has gone, gets nothing."""
    if stream is None or stream.closed:
        return
    try:
        stream.write(line + "\n")
        stream.flush()
    except OSError as error:  # as with "| head": what is left in the stream goes nowhere
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):  # a full disk, or a terminal that is gone
            problem = f"{stream.name} takes no more: {error.strerror or error}"
            write_errors.append(problem)
            _say(f"{problem}; the job goes on")
