"""Interface of a source: its rows, their micro-batches, and seeds of these."""

from __future__ import annotations

import contextlib
import hashlib
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from nbelastic.data.plan.dealing import Dealing
from nbelastic.errors import DataError, NbelasticError, summary_of

COLLATING = -1  # number that takes the place of a row in the seed of ``collate_fn``

DataSample = dict[str, bytes]
"""Digests of a dataset's subsets and of some rows, by what is said where another rank's differ."""


class RowSource(Protocol):
    """Rows that a loader, and it alone, deals to micro-batches. A source may fetch ahead."""

    name: str  # what the user calls it
    is_open: bool = False  # the end of an epoch is not known before it has come

    def __len__(self) -> int: ...

    def fetch(self, dealing: Dealing, first: int, block: range) -> Iterator[Any]:
        """Yield a batch for each micro-batch of a block, in steps from `first` on.

        Micro-batches without rows are left out. The values of a batch depend on its rows and the
        seed, and nothing else. After a reset, or when the rank's block changes, a second call takes
        the place of the first one's iterator.
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

    def settle(self, dealing: Dealing, step: int, counts: list[int]) -> None:
        """Agree with other ranks on the rows of a step whose micro-batches are done.

        All ranks call this together, if the source is open. It completes `counts`.
        """
        return

    def sample(self) -> DataSample | None:
        """Return digests of some rows; None where `describe` has them."""
        return None

    def describe(self) -> dict[str, str]:
        """Return properties of the rows, by name, to be compared with other ranks and states."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the order depends on, apart from the deal, in the source's own words."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over an order."""
        return


def is_count(value: Any) -> bool:
    """Whether a value that a user has given is a whole number, at least 1."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


@contextlib.contextmanager
def named(what: str, close: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise the errors of users' code as a DataError, which names the rows; call `close` before."""
    try:
        yield
    except Exception as error:
        close()
        if isinstance(error, NbelasticError):
            raise
        raise DataError(f"{what} {summary_of(error)}") from error


def digest_of(*parts: bytes | str) -> str:
    """Return a short digest of bytes and texts, to be compared between ranks and with a state."""
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:  # names of files need not be UTF-8
        digest.update(part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
