"""Choice of columns, and their conversion to arrays."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from nbelastic.data.plan.dealing import Rows
from nbelastic.errors import DataError, OptionError

Array: TypeAlias = np.ndarray[Any, Any]

NEEDS_TRANSFORM = (
    "{where}: column {name!r} has type {kind}, of which no tensor can be made; leave it out, or "
    "pass transform=, which makes tensors of a table"
)

SINGLE, _TUPLE = "a tensor", "a tuple"
Form = str | tuple[Any, ...]


@dataclass(frozen=True)
class RowBlock:
    """Rows of arrays of equal length."""

    arrays: tuple[Array, ...]
    form: Form = _TUPLE  # of a batch: a tensor, a tuple, or a dict with these keys

    def __len__(self) -> int:
        return len(self.arrays[0])

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return sum(array.nbytes for array in self.arrays)

    @classmethod
    def of(cls, value: Any, rows: int, where: str) -> RowBlock:
        """Return a block of a ``transform``'s result, which must have `rows` rows."""
        form: Form
        if isinstance(value, Mapping):
            form, values = tuple(value), list(value.values())
        elif isinstance(value, (tuple, list)):
            form, values = _TUPLE, list(value)
        else:
            form, values = SINGLE, [value]
        # Copies, because the function may fill the same memory for the next unit.
        arrays = tuple(np.array(_array(each, where)) for each in values)
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

    def taken(self, order: Rows) -> RowBlock:
        """Return a copy of the rows in an order."""
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
        return tensors[0] if self.form == SINGLE else tuple(tensors)


def _array(value: Any, where: str) -> Array:
    """Return a value as an array of which PyTorch makes a tensor."""
    kind = f"{value.dtype} values" if hasattr(value, "dtype") else f"a {type(value).__name__}"
    with contextlib.suppress(TypeError, RuntimeError):  # NumPy or PyTorch has no such type, layout
        if isinstance(value, torch.Tensor):
            kind = f"{kind}, {str(value.layout).removeprefix('torch.')}"
            return value.detach().cpu().resolve_conj().resolve_neg().numpy()
        if isinstance(value, np.ma.MaskedArray):
            kind = "masked values, of which the masks would be lost"
        elif isinstance(value, np.ndarray):
            native = value.astype(value.dtype.newbyteorder("="), copy=False)
            torch.from_numpy(native[:0].copy())
            return native
    raise DataError(
        f"{where}: transform returned {kind}; it must return a tensor, or a tuple or dict of "
        "tensors, of a type that NumPy has"
    )


@dataclass(frozen=True)
class ColumnChoice:
    """Columns that batches have."""

    # For each part of a batch its key, the columns in it, and whether they are stacked.
    parts: tuple[tuple[Any, tuple[str, ...], bool], ...]
    named: bool  # batches are dicts and not tuples

    @property
    def names(self) -> list[str]:
        """All columns, each once."""
        return list(dict.fromkeys(name for _, names, _ in self.parts for name in names))

    @classmethod
    def among(cls, available: Sequence[str], columns: Any, where: str) -> ColumnChoice:
        """Find the names and patterns of `columns`, or all, among `available` columns."""
        asked = [columns] if isinstance(columns, str) else columns
        if asked is None:
            asked = {name: name for name in available}
        if not isinstance(asked, (Mapping, Sequence)):
            raise OptionError(f"{where}: columns={columns!r} must be names, or a dict of names")
        pairs = [*asked.items()] if isinstance(asked, Mapping) else [(each, each) for each in asked]
        if not pairs:
            raise OptionError(f"{where}: columns={columns!r} asks for no column")
        parts: list[tuple[Any, tuple[str, ...], bool]] = []
        for key, pattern in pairs:
            if not isinstance(pattern, str):
                raise OptionError(
                    f"{where}: columns={columns!r}: {pattern!r} is no name of a column. A pattern "
                    'such as "x*" stacks columns'
                )
            stacked = pattern not in available
            found = fnmatch.filter(available, pattern) if stacked else [pattern]
            if not found:
                near = difflib.get_close_matches(pattern, available, 1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                there = ", ".join(available[:10]) + (", …" if len(available) > 10 else "")
                raise OptionError(f"{where} has no column {pattern!r}{hint} It has {there}")
            parts.append((key, tuple(found), stacked))
        choice = cls(tuple(parts), isinstance(asked, Mapping))
        for name in choice.names:
            if list(available).count(name) > 1:
                raise OptionError(f"{where} has several columns {name!r}; rename all but one")
        if len({key for key, _ in pairs}) < len(pairs):
            raise OptionError(f"{where}: columns={columns!r} asks for a column twice")
        return choice


def arrow_kind(kind: Any) -> np.dtype[Any] | None:
    """Return the type of the numbers in an Arrow type; None if it has none."""
    from pyarrow import types  # noqa: PLC0415 - an extra

    if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        return arrow_kind(kind.value_type) if not types.is_nested(kind.value_type) else None
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        found: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return found
    return None


def arrow_array(column: Any, name: str, fill: Any, where: str) -> Array:
    """Return the array of an Arrow column; of two dimensions if it holds lists."""
    import pyarrow.compute as pc  # noqa: PLC0415 - an extra
    from pyarrow import types  # noqa: PLC0415

    kind = column.type
    if arrow_kind(kind) is None:
        raise DataError(NEEDS_TRANSFORM.format(where=where, name=name, kind=kind))
    column = _without_nulls(column, name, fill, where)
    if not types.is_nested(kind):
        found: Array = column.to_numpy()
        return found
    lengths = pc.list_value_length(column).to_numpy()
    if len(lengths) and lengths.min() != lengths.max():
        raise DataError(
            f"{where}: column {name!r} has lists of {lengths.min()} to {lengths.max()} values, "
            "which make no tensor; pass transform= to pad or cut them"
        )
    values: Array = _without_nulls(pc.list_flatten(column), name, fill, where).to_numpy()
    width = lengths[0] if len(lengths) else getattr(kind, "list_size", 0)
    return values.reshape(len(lengths), width)


def _without_nulls(column: Any, name: str, fill: Any, where: str) -> Any:
    import pyarrow as pa  # noqa: PLC0415 - an extra

    if not column.null_count:
        return column
    value = fill.get(name) if isinstance(fill, Mapping) else fill
    has = f"{where}: column {name!r} has {column.null_count} nulls"
    if value is None:
        raise DataError(f"{has}; pass fill=, a number or a dict of them by column, or transform=")
    try:
        return column.fill_null(pa.scalar(value).cast(column.type))
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        cannot = f"which fill={value!r} cannot replace: {error}"
        raise DataError(f"{has}, {cannot}; pass another value, or transform=") from error
