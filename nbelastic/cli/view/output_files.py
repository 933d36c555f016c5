"""Files with all that ranks print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbelastic.driver import Output


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
