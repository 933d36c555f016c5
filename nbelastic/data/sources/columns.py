"""Columns: their choice, and their conversion to blocks of arrays, and to batches."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from nbelastic.errors import DataError, OptionError

Array: TypeAlias = np.ndarray[Any, Any]

NEEDS_TRANSFORM = (
    "{where}: column {name!r} has type {kind}, of which no tensor can be made; leave it out, or "
    "pass transform=, which makes tensors of a table"
)

Block: TypeAlias = Any
"""Rows of arrays of equal length: an array, or a tuple or dict of arrays. Batches have its form."""


def arrays_in(block: Block) -> list[Array]:
    """Return the arrays of a block."""
    if isinstance(block, dict):
        return [*block.values()]
    return [*block] if isinstance(block, tuple) else [block]


def each_array(change: Callable[..., Any], *blocks: Block) -> Any:
    """Return a block of the results of a function, called for each array of the blocks."""
    first = blocks[0]
    if isinstance(first, dict):
        return {key: change(*(block[key] for block in blocks)) for key in first}
    return tuple(map(change, *blocks)) if isinstance(first, tuple) else change(*blocks)


def block_of(value: Any, rows: int, where: str) -> Block:
    """Return a block of a ``transform``'s result, which must have `rows` rows."""
    form = dict(value) if isinstance(value, Mapping) else value
    form = tuple(value) if isinstance(value, list) else form
    block = each_array(lambda each: _array(each, where), form)
    shapes = [list(array.shape) for array in arrays_in(block)]
    if not shapes or any(shape[:1] != [rows] for shape in shapes):
        raise DataError(
            f"{where}: transform got {rows} rows and returned {str(shapes)[1:-1] or 'nothing'}; it "
            "must return tensors with a row for each row"
        )
    return block


def between(block: Block, start: int, stop: int) -> Block:
    """Return rows ``start … stop - 1`` of a block, in the same memory."""
    return each_array(lambda array: array[start:stop], block)


def joined(blocks: Sequence[Block], where: str) -> Block:
    """Return the rows of all blocks, one block after the other."""
    if len(blocks) == 1:
        return blocks[0]
    shapes = {str(each_array(lambda array: array.shape[1:], block)) for block in blocks}
    if len(shapes) > 1:
        texts = " and ".join(sorted(shapes))
        raise DataError(f"{where}: rows of differing shapes {texts} make no batch")
    return each_array(lambda *arrays: np.concatenate(arrays), *blocks)


def batch_of(block: Block) -> Any:
    """Return the rows of a block as tensors that share memory with nothing else."""
    return each_array(lambda array: torch.from_numpy(np.array(array, order="C")), block)


def _array(value: Any, where: str) -> Array:
    """Return a copy of a value as an array of which PyTorch makes a tensor."""
    # A copy, because a function may fill the same memory for the next unit.
    try:
        if isinstance(value, torch.Tensor):
            return np.array(value.detach().cpu().numpy())
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError("its mask would be lost")
        found: Array = np.array(value)
        torch.from_numpy(found)
        return found
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{where}: transform returned a {type(value).__name__} of which no tensor can be made "
            f"({error}); it must return a tensor, or a tuple or dict of tensors"
        ) from error


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
        asked = {name: name for name in available} if asked is None else asked
        pairs: Any = asked.items() if isinstance(asked, Mapping) else enumerate(asked)
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
        if not parts:
            raise OptionError(f"{where}: columns={columns!r} asks for no column")
        return cls(tuple(parts), isinstance(asked, Mapping))


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
