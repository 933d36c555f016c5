"""Interface of a source: rows, and the micro-batches that are fetched of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbelastic.data.plan import BlockSchedule, Dealing, Rows
    from nbelastic.data.sources.comparison import DataSample
    from nbelastic.elastic.ranks.context import Context

COLLATING = -1
"""Number that takes the place of a row in the seed of ``collate_fn``."""


class RowSource(Protocol):
    """Rows that a loader deals to micro-batches.

    Which rows make up a micro-batch is decided by the loader alone. A source may fetch ahead.
    """

    name: str  # what the user calls it
    is_open: bool = False  # the end of an epoch is not known before it has come

    def __len__(self) -> int:
        """Return the number of rows."""

    def rows(self, dealing: Dealing, step: int, number: int) -> Rows:
        """Return the rows of a micro-batch, by their indices in the source."""

    def fetch(self, dealing: Dealing, first: int, blocks: BlockSchedule) -> Iterator[Any]:
        """Yield a batch for each micro-batch of a rank, in steps from `first` on.

        Micro-batches without rows are left out. The values of a batch depend on its rows and the
        seed, and nothing else. After a reset, or when the rank's block changes in one of the next
        steps, a second call takes the place of the first one's iterator.
        """

    def has_step(self, dealing: Dealing, step: int) -> bool:
        """Return whether the epoch has a step."""
        return step < dealing.steps

    def rows_before(self, dealing: Dealing, step: int) -> int:
        """Return how many rows of the epoch come before a step."""
        return min(step * dealing.global_batch, dealing.rows_of_epoch)

    def counts(self, dealing: Dealing, step: int, block: range) -> list[int]:
        """Return the rows of each micro-batch of a step, of other blocks as far as is known."""
        return dealing.weights(step)

    def settle(
        self, dealing: Dealing, step: int, counts: list[int], context: Context | None
    ) -> None:
        """Agree with other ranks on the rows of a step whose micro-batches are done.

        All ranks call this together, if the source is open. It completes `counts`.
        """
        return

    def exchange_states(self, dealing: Dealing, step: int, context: Context | None) -> bool:
        """Tell all ranks from where others can go on in a step; return whether that is more.

        All ranks call this together, between two steps.
        """
        return False

    @property
    def remark(self) -> str:
        """Warning for the history, if there is one."""
        return ""

    def sample(self) -> DataSample | None:
        """Return digests of some rows; None where `requirements` describe them."""
        return None

    def requirements(self) -> dict[str, str]:
        """Return what must be equal on ranks that share a state, as names and texts."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the order depends on, apart from the deal, in the source's own words."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over an order; StateMismatch, and no change, if it is that of other rows."""
