"""Parquet files and Arrow tables as sources of rows."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np

from nbelastic.data.sources.columns import (
    NEEDS_TRANSFORM,
    ColumnChoice,
    arrow_array,
    arrow_kind,
    choose,
    row_block,
)
from nbelastic.data.sources.row_block import MadeBlocks, RowBlock, transformed
from nbelastic.data.sources.units import UnitSource
from nbelastic.elastic.redaction import Secrets
from nbelastic.errors import DataError, OptionError

if TYPE_CHECKING:
    from nbelastic.data.plan import Rows

_AT_ONCE = 16
"""Footers that are read at the same time."""

_NO_SECRETS = Secrets([])

_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Most places of a local file that are looked at, evenly spread over its columns, and bytes."""

_MOST_TEXTS = 100
"""Most files that are compared one by one; more are compared in groups."""


class _ArrowRows(UnitSource):
    """Units that are read as Arrow tables."""

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
        self.columns = columns
        self.transform = transform
        self.fill = fill
        self._choice: ColumnChoice

    def _choose(self, schema: Any, where: str) -> None:
        """Find the columns in a schema, and refuse columns that cannot become tensors."""
        self._choice = choose(self.columns, schema.names, where)
        if self.transform is not None:
            return
        for name in self._choice.names:
            kind = schema.field(name).type
            if arrow_kind(kind) is None:
                raise OptionError(NEEDS_TRANSFORM.format(where=where, name=name, kind=kind))

    def _block(self, table: Any, where: str) -> RowBlock:
        if self.transform is not None:
            block = RowBlock.of(transformed(self.transform, table, where), table.num_rows, where)
            _made_by.setdefault(self, MadeBlocks()).add(block, where)
            return block

        def array_of(name: str) -> np.ndarray[Any, Any]:
            return arrow_array(table.column(name), name, self.fill, where)

        return row_block(self._choice, array_of, where)


_made_by: weakref.WeakKeyDictionary[_ArrowRows, MadeBlocks] = weakref.WeakKeyDictionary()

_seen_same: weakref.WeakKeyDictionary[_ArrowRows, dict[str, str]] = weakref.WeakKeyDictionary()
"""The mark of each file that this process has found to hold the values that it had."""


@dataclass(frozen=True)
class _File:
    """A file, as its footer describes it; its name is its path without secrets."""

    path: str
    name: str
    size: int
    digest: str
    footer: Any
    stamp: str = ""  # the file system's own mark of this version of the file
    content: str = ""  # digest of samples of its pages, or the mark of an object store

    @property
    def text(self) -> str:
        text = f"{self.footer.num_rows} rows in {self.size} bytes, footer {self.digest}"
        return f"{text}, content {self.content}" if self.content else text


class Parquet(_ArrowRows):
    """Parquet files as the data of a :class:`~nbelastic.data.Loader`.

    Row groups are read whole, by a background thread, in windows whose rows are shuffled. Which
    rows a micro-batch has is a function of seed, epoch and step. So a resize or a resumption loses
    and repeats no row, and only row groups of the windows that are open are read again.

    The footers of the files are read here, once. Make the object in the notebook and use it in the
    training function: then they travel with the function, and ranks read none.

    Parameters
    ----------
    urls : str or sequence of str
        Files, directories, or patterns such as ``"s3://bucket/train/*.parquet"``, as fsspec takes
        them.
    columns : sequence or mapping of str, optional
        Columns of a batch, in its order. A pattern such as ``"x*"`` stacks the columns that it
        matches to one matrix. Batches are tuples, or dicts with the keys of a mapping. By default
        batches are dicts of all columns.
    shuffle_rows : int, default 100_000
        Rows among which rows are shuffled, over all streams. Windows are smaller where memory asks
        for it. At least one row group of each stream is read at a time.
    transform : callable, optional
        Gets the ``pyarrow.Table`` of a row group, and returns a tensor, or a tuple or dict of
        tensors, with a row for each of its rows. A background thread calls it. It must not draw
        random numbers, and is needed for text.
    memory : int or str, default "256 MB"
        Bound on the windows of a rank, those read ahead included.
    fill : number or dict, optional
        Value that takes the place of nulls, or values by column. By default nulls are refused.
    storage_options : dict, optional
        As fsspec takes them.

    Raises
    ------
    OptionError
        Files, or columns, are missing, files differ in their schema, or a value cannot be used.

    Examples
    --------
    >>> data = Parquet("s3://bucket/train/*.parquet", columns=["x*", "y"])  # doctest: +SKIP
    >>> loader = Loader(data, Batch(256, micro=32))  # doctest: +SKIP
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        columns: Sequence[str] | Mapping[Any, str] | None = None,
        *,
        shuffle_rows: int = 100_000,
        transform: Callable[[Any], Any] | None = None,
        memory: int | str = "256 MB",
        fill: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__("Parquet", columns, shuffle_rows, transform, memory, fill)
        _require_pyarrow("Parquet")
        if storage_options is not None and not isinstance(storage_options, Mapping):
            raise OptionError(
                "Parquet(storage_options=...): must be a dict, not "
                f"{type(storage_options).__name__}"
            )
        options = dict(storage_options or {})
        given = _given(urls)
        self._secrets = Secrets(given, options)
        shown = self._secrets.hide(repr(urls))
        self._filesystem, paths = _find(given, options, shown, self._secrets)
        self._found_at = time.time()
        with ThreadPoolExecutor(_AT_ONCE, "nbelastic-footers") as pool:
            self._files = list(pool.map(self._footer, paths))
        first = self._files[0]
        schema = first.footer.schema.to_arrow_schema()
        self._choose(schema, first.name)
        for file in self._files[1:]:
            self._compare(schema, first.name, file)
        if transform is None and fill is None:
            self._refuse_nulls()
        with ThreadPoolExecutor(_AT_ONCE, "nbelastic-pages") as pool:
            self._files = list(pool.map(self._with_content, self._files))
        self._groups = [
            (file, group) for file in self._files for group in range(file.footer.num_row_groups)
        ]
        counts = [file.footer.row_group(group).num_rows for file, group in self._groups]
        self.sizes: Rows = np.array(counts, dtype=np.int64)
        if not len(self):
            raise OptionError(f"Parquet({shown}): the files have no rows")
        widths = {name: _width(schema.field(name).type) for name in self._choice.names}
        self.row_bytes = sum(self._bytes_in(file, widths) for file in self._files) / len(self)

    def _footer(self, path: str) -> _File:
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra

        name = self._secrets.hide(path)
        try:
            if not self._filesystem.isfile(path):  # to open a pipe would wait for its writer
                raise OptionError(f"{name} cannot be read: it is no regular file")
            info = self._filesystem.info(path)
            size = info["size"]
            with self._open(path) as file:
                footer = pq.ParquetFile(file).metadata
        except OptionError:
            raise
        except Exception as error:  # whatever a file system raises
            problem = OptionError(f"{name} cannot be read: {_reason(error, self._secrets)}")
            raise problem from self._secrets.shown(error)
        digest = hashlib.blake2b(digest_size=6)
        for group in range(footer.num_row_groups):
            digest.update(repr(footer.row_group(group).to_dict()).encode())
        return _File(path, name, size, digest.hexdigest(), footer, _stamp_of(info))

    def _with_content(self, file: _File) -> _File:
        found = dataclasses.replace(file, content=self._content_of(file))
        if self._is_local and _stamp_of(self._filesystem.info(file.path)) != file.stamp:
            raise OptionError(f"{file.name} cannot be read: it was written at the same time")
        return found

    def _content_of(self, file: _File) -> str:
        """Return a digest of samples of the chosen columns, different for a file of other values.

        An object store's mark of a version is used where there is one, because each sample would be
        a request.
        """
        if not self._is_local:
            return file.stamp if file.stamp.startswith("tag ") else ""
        columns = [
            column
            for group in range(file.footer.num_row_groups)
            for _, column in self._columns_in(file, group)
        ]
        every = len(columns) // _SAMPLES + 1
        digest = hashlib.blake2b(digest_size=6)
        try:
            with open(file.path, "rb") as opened:
                for column in columns[::every]:
                    opened.seek(column.dictionary_page_offset or column.data_page_offset)
                    size = min(column.total_compressed_size, _SAMPLE_BYTES)
                    digest.update(opened.read(size))
        except OSError as error:
            raise OptionError(f"{file.name} cannot be read: {_reason(error)}") from error
        return digest.hexdigest()

    @property
    def _is_local(self) -> bool:
        return type(self._filesystem) is fsspec.implementations.local.LocalFileSystem

    def _check_unchanged(self, file: _File) -> None:
        """Refuse a file changed since it was found; a copy on another host counts as the same."""
        info = self._filesystem.info(file.path)
        if info["size"] != file.size:
            raise DataError(f"it has {info['size']} bytes, and had {file.size} when it was found")
        stamp = _stamp_of(info)
        if not self._is_local:
            if stamp != file.stamp and file.stamp:
                raise DataError("it was written again after it was found")
            return
        if stamp != file.stamp and info["mtime"] > self._found_at:
            raise DataError("it was written again after it was found")
        # Times are too coarse to tell two writings that are milliseconds apart, and a copy may have
        # any time. So the values decide, once for each time that is seen.
        same = _seen_same.setdefault(self, {})
        if same.get(file.path) != stamp:
            if self._content_of(file) != file.content:
                raise DataError("its values are not those that it had when it was found")
            same[file.path] = stamp

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[Any]:
        """Open a file without read-ahead."""
        if self._is_local:
            yield path  # Arrow's own files are read without Python's lock
            return
        with self._filesystem.open(path, "rb", cache_type="none") as file:
            yield file

    def _compare(self, schema: Any, first: str, file: _File) -> None:
        other = file.footer.schema.to_arrow_schema()
        for name in self._choice.names:
            mine = schema.field(name).type
            theirs = other.field(name).type if name in other.names else "missing"
            if theirs != mine:
                raise OptionError(
                    f"column {name!r} is {mine} in {first}, and {theirs} in {file.name}; pass "
                    "files of one schema, or other columns="
                )

    def _columns_in(self, file: _File, group: int) -> Iterator[tuple[str, Any]]:
        """Yield the chosen columns of a row group, with the footer's metadata."""
        metadata = file.footer.row_group(group)
        names = set(self._choice.names)
        for number in range(metadata.num_columns):
            column = metadata.column(number)
            path = column.path_in_schema
            # Of a column of lists, the path goes on after its name, which may have dots, too.
            name = path
            while name not in names and "." in name:
                name = name.rpartition(".")[0]
            if name in names:
                yield name, column

    def _refuse_nulls(self) -> None:
        for file in self._files:
            for group in range(file.footer.num_row_groups):
                for name, column in self._columns_in(file, group):
                    if column.path_in_schema != name:
                        continue  # of lists, an empty one counts as a null there
                    known = column.statistics if column.is_stats_set else None
                    if known is not None and known.has_null_count and known.null_count:
                        raise OptionError(
                            f"{file.name}, row group {group}: column {name!r} has "
                            f"{known.null_count} nulls; pass fill=, a number or a dict of numbers "
                            "by column, or transform="
                        )

    def _bytes_in(self, file: _File, widths: dict[str, int]) -> int:
        """Return the bytes that the chosen columns of a file take in memory, about."""
        total = 0
        for group in range(file.footer.num_row_groups):
            for name, column in self._columns_in(file, group):
                values = column.num_values * widths[name]
                total += values or column.total_uncompressed_size + 4 * column.num_values
        return total

    def read(self, unit: int) -> RowBlock:
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra

        file, group = self._groups[unit]
        where = f"{file.name}, row group {group}"
        try:
            with self._open(file.path) as opened:
                self._check_unchanged(file)
                reader = pq.ParquetFile(
                    opened,
                    metadata=file.footer,
                    pre_buffer=True,
                    page_checksum_verification=True,
                )
                with reader:
                    table = reader.read_row_group(
                        group, columns=self._choice.names, use_threads=False
                    )
        except Exception as error:  # whatever a file system or a damaged file raises
            problem = DataError(f"{where} cannot be read: {_reason(error, self._secrets)}")
            raise problem from self._secrets.shown(error)
        return self._block(table, where)

    def describe(self) -> dict[str, str]:
        count = min(len(self._files), _MOST_TEXTS)
        found = {}
        for number in range(count):
            first = number * len(self._files) // count
            files = self._files[first : (number + 1) * len(self._files) // count]
            if len(files) == 1:
                found[files[0].name] = files[0].text
            else:
                texts = "\n".join(f"{file.name} {file.text}" for file in files)
                encoded = texts.encode("utf-8", "surrogatepass")
                digest = hashlib.blake2b(encoded, digest_size=6).hexdigest()
                found[f"{files[0].name} to {files[-1].name}"] = f"{len(files)} files, {digest}"
        return found


class Arrow(_ArrowRows):
    """An Arrow table in memory as the data of a :class:`~nbelastic.data.Loader`.

    Record batches are units. Each rank needs the whole table.

    Parameters
    ----------
    table : pyarrow.Table or sequence of pyarrow.RecordBatch
        The rows.
    columns, shuffle_rows, transform, memory, fill
        As for :class:`Parquet`.

    Raises
    ------
    OptionError
        A column is missing, or a value cannot be used.
    """

    def __init__(
        self,
        table: Any,
        columns: Sequence[str] | Mapping[Any, str] | None = None,
        *,
        shuffle_rows: int = 100_000,
        transform: Callable[[Any], Any] | None = None,
        memory: int | str = "256 MB",
        fill: Any = None,
    ) -> None:
        super().__init__("Arrow", columns, shuffle_rows, transform, memory, fill)
        _require_pyarrow("Arrow")
        import pyarrow as pa  # noqa: PLC0415 - an extra

        if not isinstance(table, pa.Table):
            try:
                table = pa.Table.from_batches(list(table))
            except (TypeError, pa.ArrowException) as error:
                raise OptionError(
                    f"Arrow({type(table).__name__}): must be a pyarrow.Table, or record batches of "
                    f"one schema ({_reason(error)})"
                ) from error
        self._choose(table.schema, "the table")
        self._batches = table.to_batches()
        self.sizes: Rows = np.array([each.num_rows for each in self._batches], dtype=np.int64)
        if not len(self):
            raise OptionError("Arrow: the table has no rows")
        self.row_bytes = table.select(self._choice.names).nbytes / len(self)

    def read(self, unit: int) -> RowBlock:
        import pyarrow as pa  # noqa: PLC0415 - an extra

        table = pa.Table.from_batches([self._batches[unit]]).select(self._choice.names)
        return self._block(table, f"record batch {unit}")

    def describe(self) -> dict[str, str]:
        digest = hashlib.blake2b(self.sizes.tobytes(), digest_size=6).hexdigest()
        return {"record batches": f"{len(self.sizes)}, their rows {digest}"}


def _given(urls: str | Sequence[str]) -> list[str]:
    """Return the given URLs as a list, also for a single URL."""
    given = [urls] if isinstance(urls, (str, os.PathLike)) else urls
    if not isinstance(given, Sequence) or not all(
        isinstance(url, (str, os.PathLike)) for url in given
    ):
        raise OptionError(f"Parquet({urls!r}): must be the name of a file, or names")
    return [os.fspath(url) for url in given]


def _find(
    urls: list[str], options: dict[str, Any], shown: str, secrets: Secrets
) -> tuple[Any, list[str]]:
    """Return a file system and the files that the URLs stand for."""
    filesystems: list[Any] = []
    paths: list[str] = []
    filesystem: Any = None
    for url in urls:
        try:
            filesystem, path = fsspec.core.url_to_fs(url, **options)
            filesystems.append(filesystem)
            if any(sign in path for sign in "*?[") and not filesystem.exists(path):
                found = filesystem.glob(path)
            elif filesystem.isdir(path):
                inside = [(each, each[len(path) :]) for each in filesystem.find(path)]
                found = [each for each, name in inside if _is_data(name)]
            else:
                found = [path] if filesystem.exists(path) else []
        except Exception as error:  # whatever a file system raises
            name = secrets.hide(repr(url))
            problem = OptionError(f"Parquet({name}): {_reason(error, secrets)}")
            raise problem from secrets.shown(error)
        if not found:
            raise OptionError(f"Parquet({secrets.hide(repr(url))}): there is no such file")
        paths += sorted(found)
    if not paths:
        raise OptionError(f"Parquet({shown}): must be the name of a file, or names")
    if any(each != filesystem for each in filesystems):
        raise OptionError(f"Parquet({shown}): all files must be in one file system")
    local = isinstance(filesystem, fsspec.implementations.local.LocalFileSystem)
    names: dict[str, str] = {}
    for path in paths if local else ():  # links, and paths that are written in two ways
        before = names.setdefault(os.path.realpath(path), path)
        if before != path:
            raise OptionError(
                f"Parquet({shown}): {secrets.hide(before)} and {secrets.hide(path)} are one file, "
                "so its rows would be repeated; name one of them"
            )
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise OptionError(
            f"Parquet({shown}): {secrets.hide(twice[0])} is named more than once, so its rows "
            "would be repeated"
        )
    return filesystem, paths


def _stamp_of(info: Mapping[str, Any]) -> str:
    """Return the file system's mark of a version of a file; nothing where it has none."""
    for name in ("ETag", "etag", "md5Hash", "content_md5", "crc32c"):
        if info.get(name):
            return f"tag {info[name]}"
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        if info.get(name):
            return f"{name} {info[name]}"
    return ""


def _is_data(name: str) -> bool:
    """Return whether a path in a directory is that of data, and not of a copy or a rest.

    Jupyter, Spark and others keep theirs under names that begin with a dot or an underscore.
    """
    parts = [part for part in name.split("/") if part]
    return name.endswith(".parquet") and not any(part[0] in "._" for part in parts)


def _width(kind: Any) -> int:
    """Return the bytes of a number in a column; 0 if it has none."""
    found = arrow_kind(kind)
    return 0 if found is None else found.itemsize


def _require_pyarrow(name: str) -> None:
    try:
        import pyarrow.parquet  # noqa: F401, PLC0415
    except ImportError as error:
        raise OptionError(f"{name} needs pyarrow: pip install 'nbelastic[parquet]'") from error


def _reason(error: Exception, secrets: Secrets = _NO_SECRETS) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return secrets.hide(str(error)) or type(error).__name__
