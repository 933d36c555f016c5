"""Parquet files as sources of rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np

from nbelastic.data.sources.columns import arrow_kind
from nbelastic.data.sources.row_source import digest_of
from nbelastic.data.sources.units import UnitSource
from nbelastic.elastic.redaction import Secrets
from nbelastic.errors import DataError, OptionError

if TYPE_CHECKING:
    from nbelastic.data.plan.dealing import Rows
    from nbelastic.data.sources.columns import Block

_AT_ONCE = 16  # footers that are read at the same time

_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "crc32c")  # of versions in object stores

_DATA = re.compile(r"/?(?:[^._/][^/]*/)*[^._/][^/]*\.parquet")
"""Path in a directory. Jupyter, Spark and others keep copies under names that begin otherwise."""

_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Most places of a local file that are looked at, evenly spread over its columns, and bytes."""

_MOST_TEXTS = 100  # most files that are compared one by one; more are compared together

_compared: set[tuple[str, str, str]] = set()
"""Path, mark and content of each version of a file that this process has compared."""


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


class Parquet(UnitSource):
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

    name = "Parquet"

    def __init__(
        self,
        urls: str | Sequence[str],
        columns: Sequence[str] | Mapping[Any, str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(columns, **options)
        try:
            import pyarrow.parquet  # noqa: F401, PLC0415
        except ImportError as error:
            raise OptionError("Parquet needs pyarrow: pip install 'nbelastic[parquet]'") from error
        given, storage = _given(urls), dict(storage_options or {})
        self._secrets = Secrets(given, storage)
        shown = self._secrets.hide(repr(urls))
        self._filesystem, paths = _find(given, storage, shown, self._secrets)
        self._is_local = type(self._filesystem) is fsspec.implementations.local.LocalFileSystem
        self._found_at = time.time()
        with ThreadPoolExecutor(_AT_ONCE, "nbelastic-footers") as pool:
            files = list(pool.map(self._footer, paths))
            schema, first = files[0].footer.schema.to_arrow_schema(), files[0].name
            self._choice = self.choose(schema.names, schema.types, arrow_kind, first)
            self._files = list(pool.map(functools.partial(self._checked, schema, first), files))
        self._groups = [
            (file, group) for file in self._files for group in range(file.footer.num_row_groups)
        ]
        counts = [file.footer.row_group(group).num_rows for file, group in self._groups]
        self.sizes: Rows = np.array(counts, dtype=np.int64)
        if not len(self):
            raise OptionError(f"Parquet({shown}): the files have no rows")
        kinds = {name: arrow_kind(schema.field(name).type) for name in self._choice.names}
        total = 0
        for _, name, column in itertools.chain.from_iterable(map(self._columns_in, self._files)):
            kind, count = kinds[name], column.num_values
            text = column.total_uncompressed_size + 4 * count
            total += text if kind is None else count * kind.itemsize
        self.row_bytes = total / len(self)

    def _footer(self, path: str) -> _File:
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra

        name = self._secrets.hide(path)
        with _named(f"{name} cannot be read", OptionError, self._secrets):
            if not self._filesystem.isfile(path):  # to open a pipe would wait for its writer
                raise OptionError("it is no regular file")
            info = self._filesystem.info(path)
            with self._open(path) as file:
                footer = pq.ParquetFile(file).metadata
        groups = map(footer.row_group, range(footer.num_row_groups))
        digest = digest_of(*(repr(group.to_dict()) for group in groups))
        return _File(path, name, info["size"], digest, footer, _stamp_of(info))

    def _checked(self, schema: Any, first: str, file: _File) -> _File:
        """Return a file with its content; refuse other types than the first has, and nulls."""
        other = file.footer.schema.to_arrow_schema()
        for name in self._choice.names:
            mine = schema.field(name).type
            theirs = other.field(name).type if name in other.names else "missing"
            if theirs != mine:
                raise OptionError(
                    f"column {name!r} is {mine} in {first}, and {theirs} in {file.name}; pass "
                    "files of one schema, or other columns="
                )
        nulls_count = self.transform is None and self.fill is None
        for group, name, column in self._columns_in(file) if nulls_count else ():
            if column.path_in_schema != name:
                continue  # of lists, an empty one counts as a null there
            known = column.statistics if column.is_stats_set else None
            if known is not None and known.has_null_count and known.null_count:
                raise OptionError(
                    f"{file.name}, row group {group}: column {name!r} has {known.null_count} "
                    "nulls; pass fill=, a number or a dict of numbers by column, or transform="
                )
        found = dataclasses.replace(file, content=self._content_of(file))
        if self._is_local and _stamp_of(self._filesystem.info(file.path)) != file.stamp:
            raise OptionError(f"{file.name} cannot be read: it was written at the same time")
        return found

    def _content_of(self, file: _File) -> str:
        """Return a digest of samples of the chosen columns; other values have another digest."""
        if not self._is_local:  # each sample would be a request
            return file.stamp if file.stamp.startswith("tag ") else ""
        columns = [column for _, _, column in self._columns_in(file)]
        every = len(columns) // _SAMPLES + 1
        samples = []
        with (
            _named(f"{file.name} cannot be read", OptionError, self._secrets),
            open(file.path, "rb") as opened,
        ):
            for column in columns[::every]:
                opened.seek(column.dictionary_page_offset or column.data_page_offset)
                samples.append(opened.read(min(column.total_compressed_size, _SAMPLE_BYTES)))
        return digest_of(*samples)

    def _check_unchanged(self, file: _File) -> None:
        """Refuse a file changed since it was found; a copy on another host counts as the same."""
        info = self._filesystem.info(file.path)
        if info["size"] != file.size:
            raise DataError(f"it has {info['size']} bytes, and had {file.size} when it was found")
        stamp = _stamp_of(info)
        is_newer = not self._is_local or info["mtime"] > self._found_at
        if stamp != file.stamp and file.stamp and is_newer:
            raise DataError("it was written again after it was found")
        # Times are too coarse to tell two writings that are milliseconds apart, and a copy may have
        # any time. So the values decide, once for each time that is seen.
        version = (file.path, stamp, file.content)
        if self._is_local and version not in _compared:
            if self._content_of(file) != file.content:
                raise DataError("its values are not those that it had when it was found")
            _compared.add(version)

    def _open(self, path: str) -> Any:
        """Open a file without read-ahead; Arrow reads its own files without Python's lock."""
        if self._is_local:
            return contextlib.nullcontext(path)
        return self._filesystem.open(path, "rb", cache_type="none")

    def _columns_in(self, file: _File) -> Iterator[tuple[int, str, Any]]:
        """Yield group, name and metadata of each chosen column in the row groups of a file."""
        names = set(self._choice.names)
        for group in range(file.footer.num_row_groups):
            metadata = file.footer.row_group(group)
            for number in range(metadata.num_columns):
                column = metadata.column(number)
                # Of a column of lists, the path goes on after its name, which may have dots, too.
                name = column.path_in_schema
                while name not in names and "." in name:
                    name = name.rpartition(".")[0]
                if name in names:
                    yield group, name, column

    def read(self, unit: int) -> Block:
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra

        file, group = self._groups[unit]
        where = f"{file.name}, row group {group}"
        options = {"pre_buffer": True, "page_checksum_verification": True}
        with (
            _named(f"{where} cannot be read", DataError, self._secrets),
            self._open(file.path) as opened,
        ):
            self._check_unchanged(file)
            with pq.ParquetFile(opened, metadata=file.footer, **options) as reader:
                table = reader.read_row_group(group, columns=self._choice.names, use_threads=False)
        return self.block(self._choice, table, where)

    def describe(self) -> dict[str, str]:
        texts = {file.name: file.text for file in self._files}
        if len(texts) <= _MOST_TEXTS:
            return texts
        return {"Parquet": f"{len(texts)} files, {digest_of(str(texts))}"}


def _given(urls: str | Sequence[str]) -> list[str]:
    given = [urls] if isinstance(urls, (str, os.PathLike)) else urls
    usable = isinstance(given, Sequence) and len(given) > 0
    if not usable or not all(isinstance(url, (str, os.PathLike)) for url in given):
        raise OptionError(f"Parquet({urls!r}): must be the name of a file, or names")
    return [os.fspath(url) for url in given]


def _find(
    urls: list[str], options: dict[str, Any], shown: str, secrets: Secrets
) -> tuple[Any, list[str]]:
    """Return a file system and the files that the URLs stand for."""
    filesystems, paths = list[Any](), list[str]()
    for url in urls:
        with _named(f"Parquet({secrets.hide(repr(url))})", OptionError, secrets):
            filesystem, path = fsspec.core.url_to_fs(url, **options)
            filesystems.append(filesystem)
            if any(sign in path for sign in "*?[") and not filesystem.exists(path):
                found = filesystem.glob(path)
            elif filesystem.isdir(path):
                inside = filesystem.find(path)
                found = [name for name in inside if _DATA.fullmatch(name[len(path) :])]
            else:
                found = [path] if filesystem.exists(path) else []
            if not found:
                raise OptionError("there is no such file")
        paths += sorted(found)
    if any(each != filesystems[0] for each in filesystems):
        raise OptionError(f"Parquet({shown}): all files must be in one file system")
    local = isinstance(filesystems[0], fsspec.implementations.local.LocalFileSystem)
    # A link names a file again, and so does another way to write its path.
    for path, count in Counter(map(os.path.realpath, paths) if local else paths).items():
        if count > 1:
            raise OptionError(
                f"Parquet({shown}): {secrets.hide(path)} is named more than once, so its rows "
                "would be repeated; name it once"
            )
    return filesystems[0], paths


def _stamp_of(info: Mapping[str, Any]) -> str:
    """Return the file system's mark of a version of a file; nothing where it has none."""
    for name in (*_TAGS, "mtime", "LastModified", "last_modified", "updated", "created"):
        if info.get(name):
            return f"{'tag' if name in _TAGS else name} {info[name]}"
    return ""


@contextlib.contextmanager
def _named(what: str, kind: type[Exception], secrets: Secrets) -> Iterator[None]:
    """Raise whatever a file system, or a damaged file, raises as an error of a kind."""
    try:
        yield
    except Exception as error:
        said = secrets.hide(getattr(error, "strerror", None) or str(error)) or type(error).__name__
        raise kind(f"{what}: {said}") from secrets.shown(error)
