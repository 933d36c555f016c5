"""What a rank tells people of itself: how far it is, how fast, and what it reports.

Nothing here decides anything. It is written by the rank's thread, a few assignments per batch, and
read by the agent's, which sends it along with the heartbeats.

A report is known by the commit it came after and by its number since then, which are the same on
all ranks. What is done again after a rollback so replaces what was rolled back.
"""

from __future__ import annotations

import math
import numbers
import threading
from typing import Any, Protocol

from nbelastic.elastic.stack import stands_at

__all__ = ["Passer", "Row", "Vitals", "as_numbers"]

Row = list[Any]
"""``[commit, number since, generation, step or None, {name: value}]``."""


class Passer(Protocol):
    """Who wants to know of every batch (``nbelastic.chaos``)."""

    def step(self, recorded: bool) -> None:
        """Take note of a batch, or of a commit or check; in the rank's thread."""

    def plan(self) -> None:
        """Take note of a plan that has come; in the agent's thread."""


class Vitals:
    """The vitals of the rank whose thread makes them.

    Attributes
    ----------
    steps : int
        Batches processed; commits and checks where there is no sampler.
    samples : int
        Samples processed.
    device : str
        What it computes on.
    place : tuple of (int, int)
        Epoch and batch that its state is at.
    total : tuple of (int, int)
        Epochs in all and batches in an epoch; 0 where not declared.
    memory : tuple of (int, int)
        Bytes of tensors in its state, and of those that are copied at commits, as far as known.
    passer : Passer or None
        Who wants to know of every batch.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.device = ""
        self.place = (0, 0)
        self.total = (0, 0)
        self.memory = (0, 0)
        self.passer: Passer | None = None
        self._recording = False
        self._thread = threading.get_ident()
        self._sent = -1
        self._lock = threading.Lock()
        self._rows: list[Row] = []
        self._key = (-1, -1)
        self._number = 0

    def recorded(self, samples: int) -> None:
        """Count a batch that a sampler has recorded."""
        self._recording = True
        self.steps += 1
        self.samples += samples
        if self.passer is not None:
            self.passer.step(True)

    def checked(self) -> None:
        """Count a commit or check, where nothing better is known."""
        if not self._recording:
            self.steps += 1
            if self.passer is not None:
                self.passer.step(False)

    def report(
        self, version: int, generation: int, values: dict[str, float], step: float | None
    ) -> None:
        """Add a report."""
        key = (max(version, 0), generation)
        if key != self._key:
            self._key, self._number = key, 0
        row: Row = [key[0], self._number, generation, step, values]
        self._number += 1
        with self._lock:
            self._rows.append(row)

    def take(self) -> tuple[list[Any], list[Row]]:
        """Return what to send: the present figures, and reports not sent before.

        The last figure is the line of user code that the rank stands at, if it has not moved since
        the figures were taken before.
        """
        with self._lock:
            rows, self._rows = self._rows, []
        line = stands_at(self._thread) if self.steps == self._sent else []
        self._sent = self.steps
        figures = [self.steps, self.samples, self.device, *self.place, *self.total, *self.memory]
        return [*figures, line], rows


def as_numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return reported values as floats.

    Raises
    ------
    TypeError
        One is not a number, nor a tensor or array of one element.
    """
    return {name: _as_number(name, value) for name, value in values.items()}


def _as_number(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise TypeError(f"report({name}=…): must be a single number: {error}") from None
    if not isinstance(value, numbers.Real):
        raise TypeError(f"report({name}={value!r}): must be a number, or a tensor of one element")
    number = float(value)
    return number if math.isfinite(number) else math.nan
