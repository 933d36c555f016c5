"""Rows in memory, as arrays with a row in each place of their first dimension."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbelastic.errors import DataError, summary_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.data.plan import Rows

_SINGLE, _TUPLE = "a tensor", "a tuple"
Form = str | tuple[Any, ...]


@dataclass(frozen=True)
class RowBlock:
    """Rows of arrays of equal length."""

    arrays: tuple[np.ndarray[Any, Any], ...]
    form: Form = _TUPLE  # of a batch: a tensor, a tuple, or a dict with these keys

    def __len__(self) -> int:
        return len(self.arrays[0])

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return sum(array.nbytes for array in self.arrays)

    @classmethod
    def named(cls, arrays: Mapping[Any, np.ndarray[Any, Any]]) -> RowBlock:
        """Return a block whose batches are dicts."""
        return cls(tuple(arrays.values()), tuple(arrays))

    @classmethod
    def of(cls, value: Any, rows: int, where: str) -> RowBlock:
        """Return a block of a ``transform``'s result, which must have `rows` rows.

        `value` is a tensor, an array, or a tuple or dict of them. `where` says what it was made of,
        for the error.
        """
        form: Form
        if isinstance(value, Mapping):
            form, values = tuple(value), list(value.values())
        elif isinstance(value, (tuple, list)):
            form, values = _TUPLE, list(value)
        else:
            form, values = _SINGLE, [value]
        arrays = tuple(_array(each, where) for each in values)
        if not arrays or any(not array.ndim or len(array) != rows for array in arrays):
            found = ", ".join(str(list(array.shape)) for array in arrays) or "nothing"
            raise DataError(
                f"{where}: transform got {rows} rows and returned {found}; it must return tensors "
                "with a row for each row"
            )
        return cls(arrays, form)

    def between(self, start: int, stop: int) -> RowBlock:
        """Return rows ``start … stop - 1``, which share their memory with this block."""
        return RowBlock(tuple(array[start:stop] for array in self.arrays), self.form)

    def taken(self, order: Rows | None) -> RowBlock:
        """Return a copy of the rows in an order; None keeps theirs."""
        if order is None:
            return RowBlock(tuple(np.array(array, order="C") for array in self.arrays), self.form)
        return RowBlock(tuple(array.take(order, axis=0) for array in self.arrays), self.form)

    @staticmethod
    def joined(blocks: Sequence[RowBlock], where: str) -> RowBlock:
        """Return the rows of all blocks, one block after the other."""
        first = blocks[0]
        if len(blocks) == 1:
            return first
        shapes = {(each.form, *(array.shape[1:] for array in each.arrays)) for each in blocks}
        if len(shapes) > 1:
            texts = " and ".join(sorted(str(shape[1:]) for shape in shapes))
            raise DataError(f"{where}: rows of differing shapes {texts} make no batch")
        columns = zip(*(each.arrays for each in blocks), strict=True)
        return RowBlock(tuple(map(np.concatenate, columns)), first.form)

    def batch(self) -> Any:
        """Return the rows as tensors that share memory with nothing else."""
        tensors = [torch.from_numpy(np.array(array, order="C")) for array in self.arrays]
        if isinstance(self.form, tuple):
            return dict(zip(self.form, tensors, strict=True))
        return tensors[0] if self.form == _SINGLE else tuple(tensors)


def _array(value: Any, where: str) -> np.ndarray[Any, Any]:
    """Return a value as an array of which PyTorch makes a tensor."""
    found, kind = value, f"a {type(value).__name__}"
    if hasattr(value, "dtype"):
        kind = f"{value.dtype} values"
    if isinstance(value, torch.Tensor):
        kind = f"{kind}, {str(value.layout).removeprefix('torch.')}"
        with contextlib.suppress(TypeError, RuntimeError):  # NumPy has neither type nor layout
            found = value.detach().cpu().resolve_conj().resolve_neg().numpy()
    if isinstance(found, np.ma.MaskedArray):
        kind = "masked values, of which the masks would be lost"
    elif isinstance(found, np.ndarray):
        with contextlib.suppress(TypeError):  # PyTorch does not have its type
            native = found.astype(found.dtype.newbyteorder("="), copy=False)
            torch.from_numpy(native[:0].copy())
            return native
    raise DataError(
        f"{where}: transform returned {kind}; it must return a tensor, or a tuple or dict of "
        "tensors, of a type that NumPy has"
    )


def transformed(transform: Callable[[Any], Any], rows: Any, where: str) -> Any:
    """Return what a user's function makes of the rows of a unit; its errors name the rows."""
    try:
        return transform(rows)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{where}: transform raised {summary_of(error)}") from error


class MadeBlocks:
    """Blocks made by a ``transform`` and still in use, to find memory used twice.

    They are looked at by some of their bytes, and only where memory of a newer block overlaps.
    """

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[np.ndarray[Any, Any]], bytes, str]] = []

    def add(self, block: RowBlock, where: str) -> None:
        """Add a block; refuse a block that has overwritten an earlier block."""
        alive = []
        for ref, edges, before in self._made:
            array = ref()
            if array is None:
                continue
            overlaps = any(np.may_share_memory(array, each) for each in block.arrays)
            if overlaps and _edges(array) != edges:
                raise DataError(
                    f"{where}: transform has overwritten what it returned for {before}; return new "
                    "tensors each time, as by .copy() or .clone()"
                )
            alive.append((ref, edges, before))
        alive += [(weakref.ref(each), _edges(each), where) for each in block.arrays]
        self._made = alive


def _edges(array: np.ndarray[Any, Any]) -> bytes:
    """Return the first and the last bytes of an array's rows."""
    return b"".join(array[part].tobytes()[:256] for part in (slice(0, 8), slice(-8, None)))
