"""Parquet and Arrow: each row once, in one order for all numbers of ranks, and errors by name."""

from __future__ import annotations

import io
import os
import pickle
import re
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from nbelastic.collectives import SoloCommunicator
from nbelastic.data import Arrow, Batch, Loader, Parquet
from nbelastic.data.plan.ranges import RowRange, Window
from nbelastic.data.sources.row_block import RowBlock
from nbelastic.data.sources.units import LoadedWindow, UnitSource, WindowReader, parse_bytes
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import DataError, OptionError, StateMismatch
from tests.support.world import StaticContext

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = 1000


def table(rows: int = ROWS, first: int = 0, **more: Any) -> pa.Table:
    numbers = np.arange(first, first + rows)
    columns = {f"x{i}": (numbers * 10 + i).astype(np.float32) for i in range(3)}
    return pa.table({"id": numbers, **columns, **more})


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Four files of 1,000 rows in 40 row groups."""
    for number in range(4):
        pq.write_table(
            table(ROWS // 4, number * ROWS // 4), tmp_path / f"{number}.parquet", row_group_size=25
        )
    return tmp_path


def rank_of(rank: int, size: int) -> StaticContext:
    context = StaticContext(SoloCommunicator(generation=1))
    context.rank, context.size = rank, size
    return context


def loader_of(source: UnitSource, **options: Any) -> Loader:
    return Loader(source, Batch(40, micro=5), seed=3, **options)


def epoch_of(source: Any, size: int, loader: Loader | None = None) -> dict[tuple[int, int], Any]:
    found = {}
    for rank in range(size):
        with activate(rank_of(rank, size)):
            mine = loader or loader_of(source)
            for step in mine:
                for number, (ids, x) in zip(step.numbers, step, strict=True):
                    assert (step.number, number) not in found
                    assert ids.tolist() == mine.rows(step.number, number)
                    assert torch.equal(x, ids[:, None] * 10 + torch.arange(3.0))
                    found[step.number, number] = ids.tolist()
    return found


def consume(loader: Loader, last: int | None = None) -> None:
    for step in loader:
        list(step)
        if step.number == last:
            break


def first_of(source: UnitSource, batch: Batch) -> Any:
    return next(iter(next(iter(Loader(source, batch)))))


def no_reader() -> bool:
    return all(thread.name != "nbelastic-reader" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def ended() -> Any:
    yield
    for thread in threading.enumerate():
        if thread.name == "nbelastic-reader":
            thread.join(10)
    assert no_reader()


def test_rows_do_not_depend_on_the_number_of_ranks(files: Path) -> None:
    source = Parquet(f"{files}/*.parquet", ["id", "x*"], shuffle_rows=400)
    alone = epoch_of(source, 1)
    assert sorted(row for rows in alone.values() for row in rows) == list(range(ROWS))
    assert [row for rows in alone.values() for row in rows] != list(range(ROWS))
    for size in (2, 3, 5, 8, 9):
        assert epoch_of(source, size) == alone


def test_the_state_goes_on_at_another_number_of_ranks(files: Path) -> None:
    source = Parquet(str(files), ["id", "x*"], shuffle_rows=400)
    alone = epoch_of(source, 1)
    with activate(rank_of(1, 3)):
        loader = loader_of(source)
        consume(loader, last=11)
        saved = loader.state_dict()
    found = {}
    for rank in range(2):
        with activate(rank_of(rank, 2)):
            # Another window and memory: the order is that of the state.
            other = Loader(
                Parquet(str(files), ["id", "x*"], shuffle_rows=50), Batch(40, micro=5), seed=99
            )
            other.load_state_dict(saved)
            for step in other:
                for number, (ids, _) in zip(step.numbers, step, strict=True):
                    found[step.number, number] = ids.tolist()
    assert found == {key: rows for key, rows in alone.items() if key[0] > 11}


class Counting(LocalFileSystem):
    """File system that counts what is read of each file, and where."""

    protocol = "counting"
    reads: ClassVar[Counter[str]] = Counter()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        assert mode == "rb"
        return Counted(path)


class Counted(io.FileIO):
    """File that counts what is read of it."""

    def read(self, size: int = -1) -> bytes:
        data = super().read(size)
        Counting.reads[str(self.name)] += len(data)
        return data


@pytest.fixture
def counting() -> Any:
    fsspec.register_implementation("counting", Counting, clobber=True)
    Counting.reads.clear()
    return Counting.reads


def needed(files: Path, columns: set[str]) -> int:
    total = 0
    for path in files.glob("*.parquet"):
        footer = pq.read_metadata(path)
        for group in range(footer.num_row_groups):
            for number in range(footer.num_columns):
                column = footer.row_group(group).column(number)
                if column.path_in_schema in columns:
                    total += column.total_compressed_size
    return total


def test_a_file_system_is_asked_for_what_is_needed_and_no_more(
    tmp_path: Path, counting: Counter[str]
) -> None:
    rng = np.random.default_rng(1)
    data = {f"x{i}": rng.normal(size=80_000) for i in range(4)}
    pq.write_table(pa.table(data), tmp_path / "a.parquet", row_group_size=2_000)
    source = Parquet(f"counting://{tmp_path}/*.parquet", ["x1", "x2"])
    pickled = pickle.dumps(source)
    counting.clear()
    source = pickle.loads(pickled)
    loader = Loader(source, Batch(400, micro=100))
    assert not counting  # footers came along
    consume(loader)
    bound = 1.1 * needed(tmp_path, {"x1", "x2"})
    assert 0 < sum(counting.values()) <= bound

    # A rank that goes on with streams that it had reads none of their windows again.
    Counting.reads.clear()
    half = Loader(source, Batch(400, micro=100))
    consume(half, last=100)
    before = sum(counting.values())
    half.step -= 1  # a rollback to the last commit
    step = next(iter(half))
    list(step)
    assert (step.number, half.step) == (100, 101)
    assert sum(counting.values()) <= before + bound / 10  # what is read ahead


class Numbers(UnitSource):
    """Units in memory, some of which fail; records what is in memory."""

    def __init__(self, sizes: list[int], memory: int = 10**6, broken: int = -1) -> None:
        super().__init__("Numbers", 400, memory)
        self.sizes = np.array(sizes)
        self.row_bytes = 8.0
        self.broken = broken
        self.read_units: list[int] = []

    def read(self, unit: int) -> RowBlock:
        assert threading.current_thread().name == "nbelastic-reader"
        self.read_units.append(unit)
        if unit == self.broken:
            raise DataError(f"unit {unit} is broken")
        first = int(self.sizes[:unit].sum())
        return RowBlock((np.arange(first, first + self.sizes[unit]),))

    def describe(self) -> dict[str, str]:
        return {"units": str(self.sizes.tolist())}


def test_an_error_of_the_thread_is_raised_at_its_batch() -> None:
    source = Numbers([10] * 40, broken=17)
    good = Loader(Numbers([10] * 40), Batch(8, micro=4), seed=1)
    bad_step = min(
        step
        for step in range(len(good))
        for number in range(2)
        if any(170 <= row < 180 for row in good.rows(step, number))
    )
    loader, done = Loader(source, Batch(8, micro=4), seed=1), list[list[int]]()
    with pytest.raises(DataError, match="unit 17 is broken"):
        done.extend(rows.tolist() for step in loader for (rows,) in step)
    # Batches of windows that were whole have arrived; all rows of a window are read together.
    window = source.read_units.count(17)
    assert window == 1
    assert done == [good.rows(s, n) for s in range(len(good)) for n in range(2)][: len(done)]
    assert len(done) <= 2 * bad_step + 1
    # Asked again, as by a retry on this rank, it is read again.
    with pytest.raises(DataError, match="unit 17 is broken"):
        consume(loader)
    source.broken = -1
    loader.set_epoch(1)
    assert sum(len(rows) for step in loader for (rows,) in step) == 400


def test_windows_stay_within_their_memory() -> None:
    source = Numbers([50] * 200, memory=20_000)
    loader = Loader(source, Batch(8, micro=2), seed=1)
    rows = loader._source
    most = 0
    for step in loader:
        for _ in step:
            reader = rows._reader
            most = max(most, reader._held)
            ahead = [each for each in list(reader._ready) if not isinstance(each, Exception)]
            real = sum(each.rows.nbytes for each in [*ahead, *rows._present.values()])
            assert real <= 20_000
    assert 0 < most <= 20_000
    assert len(source.read_units) <= 200 + 3


def test_memory_that_cannot_suffice_is_refused_with_what_would() -> None:
    with pytest.raises(OptionError, match=r"Pass memory='1 MB'"):
        Loader(Numbers([10_000] * 20, memory=100_000), Batch(8, micro=2))
    Loader(Numbers([10_000] * 20, memory="1 MB"), Batch(8, micro=2))


def test_a_loader_that_is_given_up_leaves_no_thread() -> None:
    loader = Loader(Numbers([10] * 400), Batch(8, micro=4))
    steps = iter(loader)
    next(steps)
    del loader, steps


def test_batches_share_no_memory_with_windows(files: Path) -> None:
    loader = loader_of(Parquet(str(files), ["id"]))
    with activate(rank_of(0, 1)):
        for step in loader:
            seen = [ids.tolist() for (ids,) in step]
            for number in range(len(seen)):
                assert seen[number] == loader.rows(step.number, number)
            break
        for (ids,) in next(iter(loader)):
            ids.zero_()
        loader.step -= 1
        assert any(ids.any() for (ids,) in next(iter(loader)))


def test_columns_are_chosen_stacked_and_named(tmp_path: Path) -> None:
    lists = pa.array([[1.0, 2.0]] * 20, pa.list_(pa.float32()))
    fixed = pa.array([[1, 2, 3]] * 20, pa.list_(pa.int16(), 3))
    flags = pa.array([True, False] * 10)
    pq.write_table(table(20, lists=lists, fixed=fixed, flag=flags), tmp_path / "a.parquet")
    batch = next(iter(next(iter(Loader(Parquet(str(tmp_path)), Batch(4, micro=4))))))
    assert {name: (each.dtype, tuple(each.shape)) for name, each in batch.items()} == {
        "id": (torch.int64, (4,)),
        **{f"x{i}": (torch.float32, (4,)) for i in range(3)},
        "lists": (torch.float32, (4, 2)),
        "fixed": (torch.int16, (4, 3)),
        "flag": (torch.bool, (4,)),
    }
    named = Parquet(str(tmp_path), {"features": "x*", "label": "id"})
    batch = first_of(named, Batch(4, micro=4))
    assert {name: tuple(each.shape) for name, each in batch.items()} == {
        "features": (4, 3),
        "label": (4,),
    }


def test_text_goes_through_transform(tmp_path: Path) -> None:
    words = pa.array([f"w{number}" for number in range(20)])
    pq.write_table(table(20, word=words), tmp_path / "a.parquet", row_group_size=5)

    def encode(rows: pa.Table) -> torch.Tensor:
        return torch.tensor([int(word[1:]) for word in rows.column("word").to_pylist()])

    source = Parquet(str(tmp_path), ["word"], transform=encode)
    found = [int(n) for step in Loader(source, Batch(4, micro=2)) for each in step for n in each]
    assert sorted(found) == list(range(20))
    with pytest.raises(OptionError, match=r"column 'word' has type string"):
        Parquet(str(tmp_path))
    short = Parquet(str(tmp_path), ["word"], transform=lambda rows: torch.zeros(3))
    with pytest.raises(DataError, match=r"transform got 5 rows and returned \[3\]"):
        first_of(short, Batch(4, micro=2))


def test_nulls_are_refused_by_column_or_filled(tmp_path: Path) -> None:
    pq.write_table(table(20, y=pa.array([1.0, None] * 10)), tmp_path / "a.parquet")
    with pytest.raises(OptionError, match=r"row group 0: column 'y' has 10 nulls"):
        Parquet(str(tmp_path))
    for fill in (7.0, {"y": 7.0}):
        batches = Loader(Parquet(str(tmp_path), ["y"], fill=fill), Batch(4, micro=2))
        found = [float(y) for step in batches for (ys,) in step for y in ys]
        assert sorted(found) == [1.0] * 10 + [7.0] * 10
    holes = Arrow(table(20, y=pa.array([1.0, None] * 10)), ["y"])
    with pytest.raises(DataError, match="record batch 0: column 'y' has 10 nulls"):
        first_of(holes, Batch(4, micro=2))


def test_what_is_missing_is_named_before_the_start(files: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no column 'idd'; did you mean 'id'\?"):
        Parquet(str(files), ["idd"])
    with pytest.raises(OptionError, match=r"gone\.parquet'\): there is no such file"):
        Parquet(f"{files}/gone.parquet")
    pq.write_table(pa.table({"id": [1.5]}), files / "5.parquet")
    with pytest.raises(OptionError, match=r"'id' is int64 in .*0\.parquet, and double in .*5\."):
        Parquet(str(files), ["id"])
    with pytest.raises(OptionError, match=r"'x0' is float in .*0\.parquet, and missing in .*5\."):
        Parquet(str(files), ["x0"])
    (files / "5.parquet").write_bytes(b"not Parquet at all")
    with pytest.raises(OptionError, match=r"5\.parquet cannot be read"):
        Parquet(str(files))
    with pytest.raises(OptionError, match="5 rows for 8 micro-batches"):
        Loader(Arrow(table(5)), Batch(8, micro=1))
    with pytest.raises(OptionError, match=r"Loader\(Arrow, num_workers=…\)"):
        Loader(Arrow(table()), Batch(8, micro=1), num_workers=2)


def test_lists_that_differ_in_length_are_refused() -> None:
    lists = pa.array([[1.0], [1.0, 2.0]], pa.list_(pa.float64()))
    with pytest.raises(DataError, match="column 'l' has lists of 1 to 2 values"):
        next(iter(next(iter(Loader(Arrow(pa.table({"l": lists})), Batch(2, micro=2))))))


def test_a_fill_that_the_column_cannot_hold_is_refused() -> None:
    def first_of(column: pa.Array, fill: Any) -> Any:
        for step in Loader(Arrow(pa.table({"x": column}), fill=fill), Batch(4, micro=2)):
            return sorted(torch.cat([batch["x"] for batch in step]).tolist())

    whole = pa.array([1, 2, 3, None])
    assert first_of(whole, 7) == [1, 2, 3, 7]
    assert first_of(pa.array([True, True, True, None]), 0) == [0, 1, 1, 1]
    with pytest.raises(DataError, match=r"whole numbers, and fill=0.5 is none"):
        first_of(whole, 0.5)
    with pytest.raises(DataError, match="column 'x': fill='a': Could not convert"):
        first_of(whole, "a")
    with pytest.raises(DataError, match="column 'x': fill=array"):
        first_of(pa.array([True, True, True, None]), np.ones(2))
    with pytest.raises(DataError, match="1 nulls in the place of lists"):
        first_of(pa.array([[1.0], [2.0], [3.0], None]), 0.0)


def test_columns_that_are_not_one_each_are_refused() -> None:
    twice = pa.Table.from_arrays([pa.array([1, 2])] * 2, names=["x", "x"])
    with pytest.raises(OptionError, match="the table has several columns 'x'"):
        Arrow(twice)
    with pytest.raises(OptionError, match="asks for a column twice"):
        Arrow(pa.table({"x": [1, 2]}), columns=["x", "x"])
    with pytest.raises(OptionError, match=r"\['x'\] is no name of a column. A pattern"):
        Arrow(pa.table({"x": [1, 2]}), columns=[["x"]])


def test_copies_that_programs_leave_in_directories_are_no_data(files: Path) -> None:
    for hidden in (".ipynb_checkpoints/0-checkpoint.parquet", "_temporary/0.parquet"):
        (files / hidden).parent.mkdir()
        pq.write_table(table(5), files / hidden)
    assert len(Parquet(str(files))) == ROWS


def test_files_named_twice_or_in_two_file_systems_are_refused(files: Path) -> None:
    with pytest.raises(OptionError, match=r"0\.parquet is named more than once"):
        Parquet([str(files), f"{files}/0.parquet"])
    with fsspec.filesystem("memory").open("/m.parquet", "wb") as file:
        pq.write_table(table(5), file)
    with pytest.raises(OptionError, match="all files must be in one file system"):
        Parquet(["memory://m.parquet", f"{files}/0.parquet"])
    (files / "0.parquet").rename(files / "a[1].parquet")
    assert len(Parquet(f"{files}/a[1].parquet")) == ROWS // 4


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            KeyError("boom"),
            DataError,
            r"0\.parquet, row group \d: transform raised KeyError: 'boom'",
        ),
        (SystemExit(3), SystemExit, "3"),
    ],
)
def test_an_error_of_transform_is_raised_in_the_rank(
    files: Path, error: BaseException, kind: type[BaseException], message: str
) -> None:
    def transform(_: pa.Table) -> Any:
        raise error

    loader = loader_of(Parquet(f"{files}/0.parquet", transform=transform))
    with pytest.raises(kind, match=message):
        list(next(iter(loader)))


def test_a_file_that_has_changed_is_refused_by_name(files: Path) -> None:
    loader = loader_of(Parquet(str(files), ["id"]))
    saved = loader.state_dict()
    changed = files / "2.parquet"
    pq.write_table(table(ROWS // 4, 7), changed, row_group_size=25)
    other = loader_of(Parquet(str(files), ["id"]))
    with pytest.raises(StateMismatch, match=r"2\.parquet has changed since"):
        other.load_state_dict(saved)
    mine, theirs = loader.requirements(), other.requirements()
    assert [name for name in mine if mine[name] != theirs[name]] == [str(changed)]
    pq.write_table(table(ROWS // 4, 7).slice(0, 100), changed, row_group_size=25)
    with pytest.raises(DataError, match=r"2\.parquet, row group \d+ cannot be read: it has"):
        consume(loader)
    changed.unlink()
    with pytest.raises(DataError, match=r"2\.parquet, row group \d+ cannot be read: No such file"):
        consume(loader)


def test_a_name_with_line_breaks_is_named_like_any_other(tmp_path: Path) -> None:
    odd = tmp_path / "a\n\tb.parquet"
    pq.write_table(table(), odd)
    saved = loader_of(Parquet(str(odd), ["id"])).state_dict()
    pq.write_table(table().slice(0, ROWS), odd, row_group_size=7)
    other = loader_of(Parquet(str(odd), ["id"]))
    with pytest.raises(StateMismatch, match=r"a\n\tb\.parquet has changed since"):
        other.load_state_dict(saved)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.parquet")
    with pytest.raises(OptionError, match=r"a\.parquet cannot be read: it is no regular file"):
        Parquet(f"{tmp_path}/a.parquet")
    with pytest.raises(OptionError, match=r"storage_options=\.\.\.\): must be a dict, not int"):
        Parquet("a.parquet", storage_options=3)  # type: ignore[arg-type]


class Quoting(MemoryFileSystem):
    """A file system whose paths and errors have the whole URL in them, as that of HTTP."""

    protocol = "quoting"
    cachable = False
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    refuses = False

    def __init__(self, token: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.token = token

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("quoting://").lstrip("/")

    def isfile(self, path: str) -> bool:
        if Quoting.refuses:
            raise PermissionError(f"403 for {path} with {self.token}")
        return super().isfile(path)


@pytest.fixture
def quoting() -> Iterator[None]:
    fsspec.register_implementation("quoting", Quoting, clobber=True)
    yield
    Quoting.refuses = False
    Quoting.store.clear()


@pytest.mark.usefixtures("quoting")
def test_errors_and_descriptions_have_no_secrets_of_urls(monkeypatch: Any) -> None:
    url = "quoting://user:hunter2@host/a.parquet?sig=abcdef99"
    options = {"token": "swordfish"}

    def messages(*urls: Any) -> str:
        with pytest.raises(OptionError) as caught:
            Parquet(*urls, storage_options=options)
        return "".join(traceback.format_exception(caught.value))

    texts = [messages(url)]
    with fsspec.open(url, "wb") as file:
        pq.write_table(pa.table({"x": [1.0, 2.0]}), file)
    texts.append(messages([url, url]))
    texts.append(messages(url, ["y"]))
    source = Parquet(url, storage_options=options)
    texts.append(repr(source.describe()))
    monkeypatch.setattr(Quoting, "refuses", True)
    texts.append(messages(url))
    Quoting.store.clear()
    with pytest.raises(DataError) as caught:
        source.read(0)
    texts.append("".join(traceback.format_exception(caught.value)))
    for text in texts:
        assert "host/a.parquet" in text
        assert not re.search("user:|hunter2|abcdef99|swordfish", text), text


def test_memory_of_lists_counts_whatever_the_name_of_the_column(tmp_path: Path) -> None:
    lists = pa.array([[1.0, 2.0]] * 20, pa.list_(pa.float64(), 2))
    pq.write_table(pa.table({"a.b": lists, "a": [1] * 20}), tmp_path / "a.parquet")
    assert Parquet(str(tmp_path), ["a.b"]).row_bytes == 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda n: np.arange(n).astype("longdouble"), "returned (longdouble|float128) values"),
        (lambda n: np.ma.masked_array(np.arange(n), mask=[True] * n), "masked values"),
        (lambda n: torch.eye(n).to_sparse(), "torch.float32 values, sparse_coo"),
        (lambda n: torch.zeros(n).to(torch.float8_e5m2), "torch.float8_e5m2 values"),
        (lambda n: torch.zeros(n, dtype=torch.bfloat16), "torch.bfloat16 values"),
        (lambda n: (each for each in range(n)), "returned a generator"),
    ],
)
def test_values_of_which_no_tensor_can_be_made_are_named(make: Any, message: str) -> None:
    source = Arrow(table(), transform=lambda rows: make(rows.num_rows))
    with pytest.raises(DataError, match=message):
        first_of(source, Batch(4, micro=2))


@pytest.mark.parametrize(
    "make", [lambda n: np.ones(n, ">f8"), lambda n: torch.ones(n).cfloat().conj()]
)
def test_values_that_only_have_another_order_of_bytes_are_taken(make: Any) -> None:
    source = Arrow(table(), transform=lambda rows: make(rows.num_rows))
    assert first_of(source, Batch(4, micro=2)).real.tolist() == [1.0, 1.0]


def test_arrow_batches_are_units() -> None:
    batches = table().to_batches(max_chunksize=30)
    alone = epoch_of(Arrow(batches, ["id", "x*"]), 1)
    assert sorted(row for rows in alone.values() for row in rows) == list(range(ROWS))
    assert epoch_of(Arrow(batches, ["id", "x*"]), 3) == alone
    with pytest.raises(OptionError, match=r"Arrow\(int\): must be a pyarrow.Table"):
        Arrow(5)


@pytest.mark.parametrize(
    ("text", "count"),
    [("256 MB", 256e6), ("1GiB", 2**30), (12, 12), ("1.5 kB", 1500), ("3", 3)],
)
def test_sizes_are_read_as_dask_reads_them(text: Any, count: float) -> None:
    assert parse_bytes(text, "x") == count


@pytest.mark.parametrize("value", ["lots", -1, 0, True, "12 furlongs", "", 10**400, "9" * 400])
def test_other_sizes_are_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="must be a number of bytes"):
        parse_bytes(value, "memory")


def test_a_reader_that_cannot_go_on_raises_at_the_batch() -> None:
    window = Window(0, 0, 0, (RowRange(0, 0, 5),), None)

    def windows() -> Iterator[Window]:
        yield window
        raise MemoryError("windows")

    def read(window: Window) -> LoadedWindow:
        return LoadedWindow(window, RowBlock((np.arange(window.rows),)))

    reader = WindowReader(windows(), read, lambda window: 40, 1000, {})
    assert reader.take().window is window
    with pytest.raises(MemoryError, match="windows"):
        reader.take()


def test_a_reader_may_be_ended_in_its_own_thread() -> None:
    failed: list[BaseException] = []

    def read(window: Window) -> LoadedWindow:
        try:
            reader.stop()  # as the collector of garbage may do it, in any thread
        except RuntimeError as error:
            failed.append(error)
        return LoadedWindow(window, RowBlock((np.arange(window.rows),)))

    window = Window(0, 0, 0, (RowRange(0, 0, 5),), None)
    reader = WindowReader(iter([window]), read, lambda window: 40, 1000, {})
    assert reader.take().window is window
    assert not failed


def test_other_values_in_a_file_of_the_same_size_are_noticed(tmp_path: Path) -> None:
    texts = []
    for first in (1000, 2000):
        path = tmp_path / "a.parquet"
        pq.write_table(table(50, first), path, compression="none", use_dictionary=False)
        texts.append((path.stat().st_size, Parquet(str(path), ["id"]).describe()))
    (size, before), (other, after) = texts
    assert size == other
    assert before != after


# -- files that are not what they were -------------------------------------------------------------


def eights(source: UnitSource) -> Loader:
    return Loader(source, Batch(8, micro=2), seed=3)


def labels(flipped: bool = False, rows: int = 64) -> pa.Table:
    """Return a table whose file has the same size and the same statistics with other labels."""
    found = [(number + flipped) % 2 for number in range(rows)]
    return pa.table({"x": [float(n) for n in range(rows)], "y": found})


def test_a_file_that_was_written_again_with_the_same_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(labels(), path, row_group_size=8)
    size = path.stat().st_size
    loader = eights(Parquet(str(path), ["x", "y"], shuffle_rows=8))
    written = time.time() + 10
    pq.write_table(labels(flipped=True), path, row_group_size=8)
    os.utime(path, (written, written))
    assert path.stat().st_size == size
    with pytest.raises(DataError, match=r"a\.parquet, row group \d+ .*written again after it was"):
        consume(loader)


def test_a_copy_of_a_file_on_another_host_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(labels(), path, row_group_size=8)
    loader = eights(Parquet(str(path), ["x", "y"]))
    os.utime(path, (1e9, 1e9))  # copied there years ago
    consume(loader)


@pytest.mark.parametrize("when", ["at the same time", "long before"])
def test_other_values_are_refused_whatever_the_time_of_the_file(tmp_path: Path, when: str) -> None:
    """Two writings within a tick of the file system's clock, or an older file under its name."""
    path = tmp_path / "a.parquet"
    pq.write_table(labels(), path, row_group_size=8)
    stat = path.stat()
    source = Parquet(str(path), ["x", "y"])
    pq.write_table(labels(flipped=True), path, row_group_size=8)
    written = stat.st_mtime_ns if when == "at the same time" else 10**18
    os.utime(path, ns=(stat.st_atime_ns, written))
    assert path.stat().st_size == stat.st_size
    with pytest.raises(DataError, match=r"a\.parquet, row group \d+ .*its values are not those"):
        consume(eights(source))


def test_a_file_that_is_written_while_it_is_found_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(labels(), path, row_group_size=8)
    os.utime(path, (1e9, 1e9))
    plain = Parquet._footer

    def footer_of_the_old_one(self: Parquet, name: str) -> Any:
        found = plain(self, name)
        pq.write_table(labels(flipped=True), path, row_group_size=8)
        return found

    monkeypatch.setattr(Parquet, "_footer", footer_of_the_old_one)
    with pytest.raises(OptionError, match=r"a\.parquet cannot be read: it was written at the same"):
        Parquet(str(path), ["x", "y"])


def test_the_values_of_a_file_are_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(labels(), path, row_group_size=8)
    source = Parquet(str(path), ["x", "y"])
    compared: list[str] = []
    plain = Parquet._content_of
    monkeypatch.setattr(
        Parquet, "_content_of", lambda self, file: compared.append(file.name) or plain(self, file)
    )
    consume(eights(source))
    assert compared == [str(path)]


def test_other_labels_in_a_file_of_the_same_size_are_noticed_on_resuming(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    found = []
    for flipped in (False, True, False):
        pq.write_table(labels(flipped), path)
        found.append((path.stat().st_size, Parquet(str(path), ["x", "y"]).describe()))
    first, other, again = found
    assert first[0] == other[0]
    assert first[1] != other[1]
    assert first == again, "a file that was only written again is the same"


def test_an_object_store_marks_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    tag = ["one"]
    plain = MemoryFileSystem.info
    monkeypatch.setattr(
        MemoryFileSystem, "info", lambda self, path, **_: {**plain(self, path), "ETag": tag[0]}
    )
    with fsspec.filesystem("memory").open("/tagged.parquet", "wb") as file:
        pq.write_table(labels(), file, row_group_size=8)
    source = Parquet("memory://tagged.parquet", ["x", "y"])
    assert "content tag one" in str(source.describe())
    consume(eights(source))
    tag[0] = "two"
    with pytest.raises(DataError, match="written again"):
        consume(eights(source))


def test_pages_with_a_wrong_checksum_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        labels(), path, compression="none", use_dictionary=False, write_page_checksum=True
    )
    content = bytearray(path.read_bytes())
    place = content.index(np.float64(40.0).tobytes())
    content[place] ^= 1
    path.write_bytes(content)
    source = Parquet(str(path), ["x"])
    with pytest.raises(
        DataError, match=r"a\.parquet, row group 0 cannot be read: .*(CRC|crc|hecksum)"
    ):
        consume(eights(source))


@pytest.mark.parametrize("how", ["link in the folder", "link to a folder", "dots", "hard way"])
def test_one_file_under_two_names_is_refused(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    path = folder / "a.parquet"
    pq.write_table(labels(), path)
    urls: Any = [str(path)]
    if how == "link in the folder":
        (folder / "b.parquet").symlink_to(path)
        urls = str(folder)
    elif how == "link to a folder":
        (tmp_path / "e").symlink_to(folder)
        urls.append(f"{tmp_path}/e/a.parquet")
    elif how == "dots":
        urls.append(f"{tmp_path}/d/../d/a.parquet")
    else:
        (tmp_path / "e").mkdir()
        urls.append(f"{tmp_path}/e/../d/a.parquet")
    with pytest.raises(OptionError, match=r"are one file|named more than once"):
        Parquet(urls)


def test_links_alone_are_files_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number in range(2):
        pq.write_table(labels(), tmp_path / "blobs" / f"{number}")
        (tmp_path / "snapshot" / f"{number}.parquet").symlink_to(tmp_path / "blobs" / f"{number}")
    assert len(Parquet(str(tmp_path / "snapshot"))) == 128


def test_a_transform_that_reuses_its_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(labels(), path, row_group_size=8)
    memory, zeros = np.zeros((8, 1)), np.zeros(8)

    def reusing(rows: pa.Table) -> Any:
        memory[:, 0] = rows["x"].to_numpy()
        return torch.from_numpy(memory)

    with pytest.raises(DataError, match="transform has overwritten what it returned for"):
        consume(eights(Parquet(str(path), transform=reusing)))

    def constant(rows: pa.Table) -> Any:
        return rows["x"].to_numpy(), zeros

    def copying(rows: pa.Table) -> Any:
        memory[:, 0] = rows["x"].to_numpy()
        return memory.copy()

    for right in (constant, copying):
        consume(eights(Parquet(str(path), transform=right)))


def test_a_column_of_empty_lists_has_no_nulls(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    kind = pa.list_(pa.int64())
    pq.write_table(pa.table({"x": list(range(16)), "l": pa.array([[]] * 16, kind)}), path)
    sizes = Parquet(str(path), transform=lambda rows: rows["x"].to_numpy())
    consume(eights(sizes))
    source = Parquet(str(path), ["x", "l"])
    assert len(source) == 16
