"""Count of the rows that a loader's steps should have had, and have had; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbelastic.elastic.ranks.step_share import StepShare

Place = tuple[int, int]


class RowLedger:
    """Rows of the steps that are done, over all epochs.

    A step is entered when it begins. It counts in the commit after it, and in what follows. What
    all ranks have taken of a step comes from the reduction of its gradients (`StepShare.seen`).
    """

    def __init__(self) -> None:
        self.redone = 0  # rows of steps that had begun on this rank, and were rolled back
        self._seen = self._lost = 0
        self._step: tuple[StepShare, Sequence[int]] | None = None
        self._begun: dict[Place, Sequence[int]] = {}

    def resume(self, epoch: int, step: int) -> None:
        """Begin a loop. The steps from here on that had begun before are done again."""
        self.close()
        rolled_back = [rows for place, rows in self._begun.items() if place >= (epoch, step)]
        self.redone += sum(map(sum, rolled_back))
        self._begun.clear()

    def begin(self, place: Place, rows: Sequence[int], share: StepShare) -> None:
        """Enter a step by its epoch and number, with the rows of its micro-batches."""
        self.close()
        self._begun[place] = rows
        self._step = share, rows

    def close(self) -> None:
        """Count the step under way, because the loop has gone on to the next."""
        self._seen, self._lost = self.totals
        self._step = None

    def committed(self) -> None:
        """Record that a commit has all steps so far."""
        self._begun.clear()

    @property
    def totals(self) -> tuple[int, int]:
        """Rows that were seen, and rows that were not, with those of the step under way."""
        if self._step is None:
            return self._seen, self._lost
        share, rows = self._step
        seen = share.seen
        if seen is None:  # no optimizer has stepped, so each rank knows its own part alone
            seen = 0 if share.missing else sum(rows)
        return self._seen + seen, self._lost + sum(rows) - seen

    def state_dict(self) -> dict[str, int]:
        """Return the counts, as of the end of the step under way."""
        seen, lost = self.totals
        return {"seen": seen, "lost": lost, "redone": self.redone}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go back to earlier counts, except for what was done again."""
        self._step = None
        self._seen, self._lost = int(state_dict.get("seen", 0)), int(state_dict.get("lost", 0))
        self.redone = max(self.redone, int(state_dict.get("redone", 0)))
