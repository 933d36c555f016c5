"""Whole lines of what ranks print, and files with all of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbelastic.driver import Output


class RankLines:
    """Joins the pieces of what ranks print, all of them or rank 0, to lines.

    Of a line that overwrites itself, such as a progress bar, only its last state is kept.
    """

    def __init__(self, *, all_ranks: bool = False) -> None:
        self._all_ranks = all_ranks
        self._open: dict[int, tuple[int | None, str]] = {}

    def take(self, outputs: Iterable[Output]) -> list[tuple[int | None, str]]:
        """Return the lines that are whole now, each with its rank."""
        found = []
        for output in outputs:
            if output.rank != 0 and not self._all_ranks:
                continue
            _, before = self._open.get(output.start, (None, ""))
            text = (before + output.text).replace("\r\n", "\n")
            *lines, rest = text.split("\n")
            found += [(output.rank, _last_state(line)) for line in lines]
            waits = rest.endswith("\r")  # the next piece may begin with its line feed
            self._open[output.start] = (output.rank, rest if waits else _last_state(rest))
        return found

    def rest(self) -> list[tuple[int | None, str]]:
        """Return the lines that have not ended."""
        found = [(rank, _last_state(text)) for rank, text in self._open.values()]
        self._open.clear()
        return [(rank, text) for rank, text in found if text]


def _last_state(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def prefixed(rank: int | None, line: str) -> str:
    """Return a line with its rank before it, as horovodrun writes it."""
    return f"[{'–' if rank is None else rank}]<stdout>: {line}"


class OutputFiles:
    """Appends what ranks print to ``DIR/rank.N/stdout``."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def write(self, outputs: Iterable[Output]) -> None:
        """Append pieces to the files."""
        for output in outputs:
            number = "unknown" if output.rank is None else output.rank
            place = self._directory / f"rank.{number}"
            place.mkdir(parents=True, exist_ok=True)
            with open(place / "stdout", "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(output.text)
