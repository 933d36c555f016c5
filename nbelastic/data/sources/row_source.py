"""Interface of a source: rows, and the micro-batches fetched from rows."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from nbelastic.data.plan import mix
from nbelastic.data.sources.seeding import generators_in, generators_kept, seed_generators
from nbelastic.data.sources.stream_reader import row_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbelastic.data.plan import BlockSchedule, Dealing, Rows
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
        """Tell all ranks the positions to resume from in a step; return whether any are new.

        All ranks call this together, between two steps.
        """
        return False

    @property
    def remark(self) -> str:
        """Warning for the history, or empty."""
        return ""

    def sample(self) -> DataSample | None:
        """Return digests of some rows; None where `requirements` describe them."""
        return None

    def requirements(self) -> dict[str, str]:
        """Return the properties that ranks with a shared state must have in common, by name."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the order depends on, apart from the deal, in the source's own words."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over an order; StateMismatch, and no change, for the order of other rows."""


ROWS = 12
"""Rows that are compared, at places that are the same on all ranks."""

LONGEST_S = 0.02
"""Seconds after which no further row is fetched. Only rows that both ranks have are compared."""

_INDICES = 1 << 17
"""Most indices of a subset that are looked at, evenly spread."""

USUAL_CAUSES = (
    "The usual causes: random_split or a shuffle without a generator of a fixed seed, labels "
    "numbered from a set, a folder's listing without sorted(), or a generator seeded by the rank. "
    "Build the same dataset on all ranks"
)


@dataclass(frozen=True)
class DataSample:
    """Digests of a dataset."""

    length: int  # its rows
    subsets: tuple[bytes, ...] = ()  # of the indices of each subset in it
    rows: Mapping[int, bytes] = field(default_factory=dict)  # of some rows, by their indices


def sample_of(dataset: Any, *, fetches: bool) -> DataSample:
    """Return digests of a dataset.

    Rows that are slow, that differ from call to call, or whose dataset draws from generators of its
    own are left out. `fetches` says whether rows may be fetched that are not in memory. If worker
    processes fetch them, the rank's own process could open files there that workers would share.
    """
    subsets, inner = [], []
    for part in _parts_of(dataset):
        if isinstance(part, Subset):
            subsets.append(_digest_of(part.indices))
        else:
            inner.append(part)
    in_memory = all(isinstance(part, (TensorDataset, list, tuple, np.ndarray)) for part in inner)
    rows = _rows_of(dataset) if in_memory or fetches else {}
    return DataSample(len(dataset), tuple(subsets), rows)


def difference(mine: DataSample, theirs: DataSample) -> str:
    """Return what differs between the samples of two ranks; nothing if they may be equal."""
    if mine.length != theirs.length:
        return ""  # said elsewhere
    for number, (one, other) in enumerate(zip(mine.subsets, theirs.subsets, strict=False)):
        if one != other:
            return f"the indices of its Subset differ{f' (Subset {number})' if number else ''}"
    for row, digest in mine.rows.items():
        if theirs.rows.get(row, digest) != digest:
            return f"row {row} differs"
    return ""


def _parts_of(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and the datasets inside torch's own wrappers."""
    waiting = [dataset]
    for _ in range(ROWS * ROWS):
        if not waiting:
            return
        part = waiting.pop()
        yield part
        if isinstance(part, Subset):
            waiting.append(part.dataset)
        elif isinstance(part, ConcatDataset):
            waiting.extend(reversed(part.datasets))


def _digest_of(indices: Any) -> bytes:
    try:
        every = len(indices) // _INDICES + 1
        seen = np.asarray(indices[::every], dtype=np.int64)
    except Exception:  # of any class, with indices of any kind
        return b""
    return hashlib.blake2b(seen.tobytes(), digest_size=16).digest()


def _rows_of(dataset: Any) -> dict[int, bytes]:
    length = len(dataset)
    if not length or generators_in(dataset):
        return {}
    found: dict[int, bytes] = {}
    begun = time.monotonic()
    with generators_kept():
        for number in dict.fromkeys([0, length - 1, *(mix(n) % length for n in range(ROWS))]):
            try:
                first, again = _fetched(dataset, number), _fetched(dataset, number)
            except Exception:  # the training will find it
                return found
            if first == again:
                found[number] = first
            if time.monotonic() > begun + LONGEST_S:
                break
    return found


def _fetched(dataset: Any, row: int) -> bytes:
    seed_generators(mix(row))
    return row_digest(dataset[row])
