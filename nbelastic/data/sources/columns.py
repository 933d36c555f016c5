"""Choice of columns, and their conversion to arrays."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nbelastic.data.sources.row_source import named
from nbelastic.data.sources.units import RowBlock, UnitSource
from nbelastic.errors import DataError, OptionError

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

NEEDS_TRANSFORM = (
    "{where}: column {name!r} has type {kind}, of which no tensor can be made; leave it out, or "
    "pass transform=, which makes tensors of a table"
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


class ColumnSource(UnitSource):
    """Units that are read as tables of Arrow, or given to a ``transform``."""

    def __init__(
        self,
        name: str,
        columns: Any,
        shuffle_rows: int,
        transform: Callable[[Any], Any] | None,
        memory: int | str,
        fill: Any,
    ) -> None:
        super().__init__(name, shuffle_rows, memory)
        if transform is not None and not callable(transform):
            raise OptionError(f"{name}(transform={transform!r}): must be a function")
        self.columns, self.transform, self.fill = columns, transform, fill

    def choose(
        self,
        available: Sequence[str],
        kind_of: Callable[[str], Any],
        is_number: Callable[[Any], object],
        where: str,
    ) -> ColumnChoice:
        """Find the names and patterns of `columns`, or all, among `available` columns of numbers.

        Other columns are refused, unless there is a ``transform``.
        """
        columns = [self.columns] if isinstance(self.columns, str) else self.columns
        if columns is not None and not isinstance(columns, (Mapping, Sequence)):
            raise OptionError(f"{where}: columns={columns!r} must be names, or a dict of names")
        named = columns is None or isinstance(columns, Mapping)
        asked = list(available) if columns is None else columns
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
        choice = ColumnChoice(tuple(parts), named)
        for name in choice.names:
            if list(available).count(name) > 1:
                raise OptionError(f"{where} has several columns {name!r}; rename all but one")
            if self.transform is None and not is_number(kind := kind_of(name)):
                raise OptionError(NEEDS_TRANSFORM.format(where=where, name=name, kind=kind))
        if len({key for key, _ in pairs}) < len(pairs):
            raise OptionError(f"{where}: columns={columns!r} asks for a column twice")
        return choice

    def choose_in(self, schema: Any, where: str) -> ColumnChoice:
        """Find the columns in a schema of Arrow's."""
        return self.choose(schema.names, lambda name: schema.field(name).type, arrow_kind, where)

    def transformed(self, given: Any, rows: int, where: str) -> RowBlock:
        """Return what the user's function makes of the rows of a unit; its errors name the rows."""
        assert self.transform is not None
        with named(f"{where}: transform raised"):
            found = self.transform(given)
        return RowBlock.of(found, rows, where)

    def block(self, choice: ColumnChoice, table: Any, where: str) -> RowBlock:
        """Return the chosen columns of a table as arrays, stacked where a pattern stands."""
        if self.transform is not None:
            return self.transformed(table, table.num_rows, where)
        arrays = {}
        for key, names, stacked in choice.parts:
            found = [arrow_array(table.column(name), name, self.fill, where) for name in names]
            if stacked and any(array.ndim != 1 for array in found):
                raise DataError(f"{where}: columns of lists cannot be stacked ({', '.join(names)})")
            arrays[key] = np.stack(found, axis=1) if stacked else found[0]
        return RowBlock(tuple(arrays.values()), *([tuple(arrays)] if choice.named else []))


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
