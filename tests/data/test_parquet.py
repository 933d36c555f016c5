"""Parquet: what is read, files that change, columns and values, and errors by name."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from nbelastic.data import Batch, Loader, Parquet
from nbelastic.data.sources import parquet
from nbelastic.data.sources.columns import Block
from nbelastic.data.sources.units import UnitSource, parse_bytes
from nbelastic.errors import DataError, OptionError, StateMismatch
from tests.elastic.test_checkpoint_places import Odd, odd  # noqa: F401


def written(path: Path, flipped: bool = False, rows: int = 64, **columns: Any) -> Path:
    """Write a file; with other labels it has the same size and the same statistics."""
    labels = [(number + flipped) % 2 for number in range(rows)]
    found = pa.table({"x": [float(number) for number in range(rows)], "y": labels, **columns})
    pq.write_table(found, path, row_group_size=8)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of 64 rows in 8 row groups."""
    return written(tmp_path / "a.parquet")


def loader_of(source: UnitSource, micro: int = 2) -> Loader:
    return Loader(source, Batch(4 * micro, micro=micro), seed=3)


def consume(source: UnitSource | Loader, last: int | None = None) -> list[Any]:
    """Return the batches, up to those of a step."""
    found = []
    for step in source if isinstance(source, Loader) else loader_of(source):
        found += list(step)
        if step.number == last:
            break
    return found


@pytest.fixture(autouse=True)
def readers_end() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "nbelastic-reader":
            thread.join(10)
            assert not thread.is_alive()


# -- what is read, and when ------------------------------------------------------------------------


def test_a_file_system_is_asked_for_what_is_needed_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, url = np.random.default_rng(1), "memory://many.parquet"
    with fsspec.open(url, "wb") as file:
        data = {f"x{i}": rng.normal(size=80_000) for i in range(4)}
        pq.write_table(pa.table(data), file, row_group_size=2_000)
    bound = 1.1 * fsspec.filesystem("memory").size("/many.parquet") / 2
    pickled = pickle.dumps(Parquet(url, ["x1", "x2"]))
    plain, counts = MemoryFile.read, list[int]()

    def read(self: MemoryFile, size: int = -1) -> bytes:
        found = plain(self, size)
        counts.append(len(found))
        return found

    monkeypatch.setattr(MemoryFile, "read", read)
    loader = loader_of(pickle.loads(pickled), 100)
    assert not counts  # footers came along
    consume(loader, last=100)
    before = sum(counts)
    for _ in range(2):  # other loaders of the process
        consume(Numbers([50] * 8), last=0)
    loader.step -= 1  # a rollback to the last commit: its windows are not read again
    step = next(iter(loader))
    list(step)
    assert (step.number, loader.step) == (100, 101)
    assert sum(counts) <= before + bound / 10  # what is read ahead
    consume(loader)
    assert bound / 2 < sum(counts) <= bound


class Numbers(UnitSource):
    """Units in memory, of which one may fail."""

    name = "Numbers"

    def __init__(self, sizes: list[int], memory: int | str = 10**6, broken: int = -1) -> None:
        super().__init__(shuffle_rows=400, memory=memory)
        self.sizes = np.array(sizes)
        self.row_bytes = 8.0
        self.broken = broken
        self.read_units: list[int] = []

    def read(self, unit: int) -> Block:
        assert threading.current_thread().name == "nbelastic-reader"
        self.read_units.append(unit)
        if unit == self.broken:
            raise DataError(f"unit {unit} is broken")
        first = int(self.sizes[:unit].sum())
        return (np.arange(first, first + self.sizes[unit]),)

    def describe(self) -> dict[str, str]:
        return {"units": str(self.sizes.tolist())}


def test_an_error_of_the_thread_is_raised_at_its_batch_and_the_window_read_again() -> None:
    source = Numbers([10] * 40, broken=17)
    loader, whole = (
        Loader(each, Batch(8, micro=4), seed=1) for each in (source, Numbers([10] * 40))
    )
    rows, done = [row.tolist() for (row,) in consume(whole)], list[list[int]]()
    bad = next(place for place, each in enumerate(rows) if any(170 <= row < 180 for row in each))
    with pytest.raises(DataError, match="unit 17 is broken"):
        done.extend(rows.tolist() for step in loader for (rows,) in step)
    # Batches of windows that were whole have arrived; all rows of a window are read together.
    assert source.read_units.count(17) == 1
    assert done == rows[: len(done)]
    assert len(done) <= bad + 1
    source.broken, loader.step = -1, 0  # asked again, as by a retry on this rank
    assert [row.tolist() for (row,) in consume(loader)] == rows


def test_windows_stay_within_their_memory() -> None:
    source = Numbers([50] * 200, memory=3_000)
    loader: Any = loader_of(source)
    most = 0
    for step in loader:
        for _ in step:
            most = max(most, loader._source._reader.held)
    assert 0 < most <= 3_000
    assert len(source.read_units) <= 200 + 3


def test_memory_that_cannot_suffice_is_refused_with_what_would() -> None:
    with pytest.raises(OptionError, match=r"Pass memory='1 MB'"):
        loader_of(Numbers([10_000] * 20, memory=100_000))
    loader_of(Numbers([10_000] * 20, memory="1 MB"))


def test_a_sample_within_an_epoch_takes_nothing_from_it() -> None:
    loader = Loader(Numbers([10] * 40, memory=4_000), Batch(8, micro=4), seed=1)
    rows = []
    for step in loader:
        rows += [row for (batch,) in step for row in batch.tolist()]
        if step.number == 25:
            assert loader.sample()[0].tolist() == rows[:4]
    assert sorted(rows) == list(range(400))


def test_batches_share_no_memory_with_windows(path: Path) -> None:
    loader = loader_of(Parquet(str(path), ["x"]))
    for (xs,) in next(iter(loader)):
        xs.zero_()
    loader.step -= 1
    assert any(xs.any() for (xs,) in next(iter(loader)))


def test_sizes_are_read_as_dask_reads_them() -> None:
    for value, count in (("256 MB", 256e6), ("1GiB", 2**30), (12, 12), ("1.5 kB", 1500)):
        assert parse_bytes(value, "memory") == count
    for value in ("lots", -1, 0, True, "12 furlongs", "9" * 400):
        with pytest.raises(OptionError, match="must be a number of bytes"):
            parse_bytes(value, "memory")


# -- columns, and the tensors that are made of them ------------------------------------------------

NULLS = [1.0, None] * 10


def batch_of(given: dict[str, Any], **options: Any) -> Any:
    """Return the rows of a file, as one batch."""
    with fsspec.open("memory://batch.parquet", "wb") as file:
        pq.write_table(found := pa.table(given), file)
    data = Parquet("memory://batch.parquet", **options)
    (batch,) = consume(Loader(data, Batch(len(found), micro=len(found))))
    return batch


def test_columns_are_chosen_stacked_and_named() -> None:
    lists = pa.array([[1.0, 2.0]] * 4, pa.list_(pa.float32()))
    fixed = pa.array([[1, 2, 3]] * 4, pa.list_(pa.int16(), 3))
    more = {"lists": lists, "fixed": fixed, "flag": [True, False] * 2, "id": range(4)}
    columns = {**{f"x{i}": pa.array([float(i)] * 4, pa.float32()) for i in range(3)}, **more}
    batch = batch_of(columns)
    assert {name: (each.dtype, tuple(each.shape)) for name, each in batch.items()} == {
        **{f"x{i}": (torch.float32, (4,)) for i in range(3)},
        "lists": (torch.float32, (4, 2)),
        "fixed": (torch.int16, (4, 3)),
        "flag": (torch.bool, (4,)),
        "id": (torch.int64, (4,)),
    }
    named = batch_of(columns, columns={"features": "x*", "label": "id"})
    assert named["features"].tolist() == [[0.0, 1.0, 2.0]] * 4
    assert sorted(named["label"].tolist()) == [*range(4)]


def test_nulls_are_filled() -> None:
    for fill in (7.0, {"x": 7.0}):
        assert sorted(batch_of({"x": NULLS}, fill=fill)["x"].tolist()) == [1.0] * 10 + [7.0] * 10
    assert sorted(batch_of({"x": [True, True, None]}, fill=0)["x"].tolist()) == [0, 1, 1]


def made(make: Callable[[int], Any]) -> dict[str, Any]:
    return {"transform": lambda rows: make(rows.num_rows)}


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        ([[1.0], [1.0, 2.0]], {}, "column 'x' has lists of 1 to 2 values"),
        ([1, None], {"fill": 0.5}, "which fill=0.5 cannot replace: Float value"),
        ([1, None], {"fill": "a"}, "column 'x' has 1 nulls, which fill='a' cannot replace"),
        ([True, None], {"fill": np.ones(2)}, "fill=array.* cannot replace"),
        ([[1.0], None], {"fill": 0.0}, "fill=0.0 cannot replace"),
        # Values of which no tensor can be made.
        ([1, 2], made(lambda n: np.ones(n, "longdouble")), "longdouble"),
        (
            [1, 2],
            made(lambda n: np.ma.masked_array(np.ones(n), mask=[True] * n)),
            "its mask would be lost",
        ),
        (
            [1, 2],
            made(lambda n: torch.eye(n).to_sparse()),
            "no tensor can be made .*[sS]parse",
        ),
        (
            [1, 2],
            made(lambda n: torch.zeros(n, dtype=torch.bfloat16)),
            "no tensor .*BFloat16",
        ),
        ([1, 2], made(lambda n: (each for each in range(n))), "returned a generator"),
        ([1, 2], made(lambda n: torch.zeros(3)), r"transform got 2 rows and returned \[3\]"),
        ([1, 2], made(lambda n: {}["boom"]), "row group 0: transform raised KeyError: 'boom'"),
    ],
)
def test_values_that_make_no_batch_are_named(column: Any, options: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        batch_of({"x": column}, **options)


def test_units_of_differing_shapes_make_no_batch(path: Path) -> None:
    widths = itertools.count()
    wider = made(lambda rows: torch.zeros(rows, next(widths)))
    with pytest.raises(DataError, match=r"rows of differing shapes .* make no batch"):
        consume(Parquet(str(path), **wider))


def test_an_exit_in_transform_is_raised_in_the_rank() -> None:
    with pytest.raises(SystemExit, match="3"):
        batch_of({"x": [1, 2]}, transform=lambda _: sys.exit(3))


def test_text_goes_through_a_transform_that_may_reuse_its_memory(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(64)]
    path = str(written(tmp_path / "a.parquet", word=words))
    memory = np.zeros((8, 1))

    def encode(rows: pa.Table) -> torch.Tensor:
        memory[:, 0] = [int(word[1:]) for word in rows["word"].to_pylist()]
        return torch.from_numpy(memory)

    found = consume(Parquet(path, ["word"], transform=encode))
    assert sorted(torch.cat(found).view(-1).tolist()) == list(range(64))


def test_lists_are_measured_by_any_name_and_empty_ones_are_no_nulls(tmp_path: Path) -> None:
    pairs = pa.array([[1.0, 2.0]] * 64, pa.list_(pa.float64(), 2))
    empty = pa.array([[]] * 64, pa.list_(pa.int64()))
    path = str(written(tmp_path / "a.parquet", **{"a.b": pairs, "a": [1] * 64, "l": empty}))
    assert Parquet(path, ["a.b"]).row_bytes == 16
    assert consume(Parquet(path, ["x", "l"]))[0][1].shape == (2, 0)


# -- which files -----------------------------------------------------------------------------------


def beside(path: Path, **columns: Any) -> str:
    """Write another file beside one, and return their folder."""
    pq.write_table(pa.table(columns), path.with_name("b.parquet"))
    return str(path.parent)


def linked(path: Path, name: str, to: Path) -> Path:
    (path.parent / name).symlink_to(to)
    return path.parent


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Parquet(str(p), ["xx"]), r"no column 'xx'; did you mean 'x'\?"),
        (lambda p: Parquet(f"{p}.gone"), r"gone'\): there is no such file"),
        (lambda p: Parquet(beside(p, x=[1]), ["x"]), r"'x' is double in .*a\..*, and int64 in .*b"),
        (lambda p: Parquet(beside(p, x=[1.0])), r"'y' is int64 in .*a\..*, and missing in .*b\."),
        (lambda p: Parquet(beside(p, s=["a"])[:0] or str(p.parent / "b.parquet")), "has type str"),
        (
            lambda p: Parquet(beside(p, x=NULLS) + "/b.parquet"),
            "row group 0: column 'x' has 10 nulls",
        ),
        (lambda p: p.write_bytes(b"not Parquet") and Parquet(str(p)), "a.parquet cannot be read"),
        (lambda p: os.mkfifo(f"{p}.pipe") or Parquet(f"{p}.pipe"), "it is no regular file"),
        (lambda p: Loader(Parquet(str(p)), Batch(65, micro=1)), "64 rows for 65 micro-batches"),
        (lambda p: Loader(Parquet(str(p)), Batch(1, micro=1), num_workers=2), "num_workers"),
        (lambda p: Parquet(str(p), []), "asks for no column"),
        (lambda p: Parquet(str(p), [["x"]]), r"\['x'\] is no name of a column. A pat"),
        # One file under two names, and files in two file systems.
        (lambda p: Parquet([str(p.parent), str(p)]), r"a\.parquet is named more than once"),
        (lambda p: Parquet([str(p), f"{linked(p, 'e', p.parent)}/e/a.parquet"]), "more than once"),
        (lambda p: Parquet([str(p), f"{p.parent}/../{p.parent.name}/a.parquet"]), "more than once"),
        (
            lambda p: (
                fsspec.filesystem("memory").pipe("/m.parquet", p.read_bytes())
                or Parquet(["memory://m.parquet", str(p)])
            ),
            "all files must be in one file system",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_start(
    path: Path, make: Callable[[Path], Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        make(path)


def test_a_directory_has_its_files_and_links_but_no_copies_of_programs(path: Path) -> None:
    for hidden in (".ipynb_checkpoints/0-checkpoint.parquet", "_temporary/0.parquet"):
        (path.parent / hidden).parent.mkdir()
        written(path.parent / hidden)
    bracketed = path.rename(path.parent / "a[1].parquet")
    assert len(Parquet(str(path.parent))) == len(Parquet(str(bracketed))) == 64
    (path.parent / "snapshot").mkdir()  # as the Hub's: links alone
    for number in range(2):
        blob = written(path.parent / f"blob{number}")
        (path.parent / f"snapshot/{number}.parquet").symlink_to(blob)
    assert len(Parquet(f"{path.parent}/snapshot")) == 128


@pytest.mark.usefixtures("odd")
def test_errors_and_descriptions_have_no_secrets_of_urls(path: Path) -> None:
    url = "odd://user:hunter2@host/a.parquet?sig=abcdef99"
    options = {"token": "swordfish"}

    def found(*urls: Any) -> Any:
        return Parquet(*urls, storage_options=options)

    def check(call: Callable[[], Any], kind: type[Exception] = OptionError) -> None:
        with pytest.raises(kind) as caught:
            call()
        text = "".join(traceback.format_exception(caught.value))
        assert "host/a.parquet" in text
        assert not re.search("user:|hunter2|abcdef99|swordfish", text), text

    check(lambda: found(url))
    with fsspec.open(url, "wb") as file:
        file.write(path.read_bytes())
    check(lambda: found([url, url]))
    check(lambda: found(url, ["z"]))
    source = found(url)
    assert [*source.describe()] == ["/***@host/a.parquet?sig=***"]
    Odd.fails.add("isfile")
    check(lambda: found(url))
    Odd.store.clear()
    check(lambda: source.read(0), DataError)


# -- files that are not what they were -------------------------------------------------------------


def test_a_file_that_has_changed_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = written(tmp_path / "a\n\tb.parquet")
    loader: Any = loader_of(Parquet(str(tmp_path), ["x"]))
    written(changed, y=range(64))
    other: Any = loader_of(Parquet(str(tmp_path), ["x"]))
    with pytest.raises(StateMismatch, match=r"a\n\tb\.parquet has changed since"):
        other.load_state_dict(loader.state_dict())
    mine, theirs = loader.requirements(), other.requirements()
    assert [name for name in mine if mine[name] != theirs[name]] == [str(changed)]
    monkeypatch.setattr(parquet, "_MOST_TEXTS", 0)  # of many files, all together
    (mine,), (theirs,) = (each._source._source.describe().items() for each in (loader, other))
    assert (mine[0], theirs[0], mine != theirs) == ("Parquet", "Parquet", True)
    with pytest.raises(DataError, match=r"b\.parquet, row group \d+ cannot be read: it has"):
        consume(loader)
    changed.unlink()
    with pytest.raises(DataError, match=r"b\.parquet, row group \d+ cannot be read: No such file"):
        consume(loader)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (None, "its values are not those"),  # within a tick of the file system's clock
        (1e9, "its values are not those"),  # an older file under its name
        (4e9, "written again after it was"),  # in 2096
    ],
)
def test_other_values_in_a_file_of_the_same_size_are_refused(
    path: Path, at: float | None, message: str
) -> None:
    stat, source = path.stat(), Parquet(str(path), ["x", "y"])
    written(path, flipped=True)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns if at is None else int(at * 1e9)))
    assert path.stat().st_size == stat.st_size
    with pytest.raises(DataError, match=rf"a\.parquet, row group \d+ .*{message}"):
        consume(source)
    other = Parquet(str(path), ["x", "y"])  # on resuming
    assert other.describe() != source.describe()
    written(path)  # a file that was only written again is the same
    assert Parquet(str(path), ["x", "y"]).describe() == source.describe()
    os.utime(path, (1e9, 1e9))  # and so is a copy on another host, written there years ago
    consume(source)


def test_a_file_that_is_written_while_it_is_found_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(path, (1e9, 1e9))
    plain = Parquet._footer

    def footer_of_the_old_one(self: Parquet, name: str) -> Any:
        found = plain(self, name)
        written(path, flipped=True)
        return found

    monkeypatch.setattr(Parquet, "_footer", footer_of_the_old_one)
    with pytest.raises(OptionError, match=r"a\.parquet cannot be read: it was written at the same"):
        Parquet(str(path), ["x", "y"])


def test_an_object_store_marks_its_versions(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tag = ["one"]
    plain = MemoryFileSystem.info
    monkeypatch.setattr(
        MemoryFileSystem, "info", lambda self, path, **_: {**plain(self, path), "ETag": tag[0]}
    )
    fsspec.filesystem("memory").pipe("/tagged.parquet", path.read_bytes())
    source = Parquet("memory://tagged.parquet", ["x", "y"])
    assert "content tag one" in str(source.describe())
    consume(source)
    tag[0] = "two"
    with pytest.raises(DataError, match="written again"):
        consume(source)


def test_pages_with_a_wrong_checksum_are_refused(path: Path) -> None:
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.table({"x": [float(number) for number in range(64)]}), path, **options)
    content = bytearray(path.read_bytes())
    content[content.index(np.float64(40.0).tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"a\.parquet, row group 0 cannot be read: .*(CRC|crc|hecksum)"
    ):
        consume(Parquet(str(path), ["x"]))
