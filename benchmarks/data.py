"""Rows a second and first batches of loaders of Parquet files, side by side in one run.

500,000 rows of 18 columns are in 4 files with 40 row groups. Candidates, with batches of 256 rows:

- *nbelastic*: a ``Loader`` over ``Parquet``, shuffled in windows of 100,000 rows;
- *torch*: a ``DataLoader`` over the same rows as tensors in memory, shuffled;
- *pyarrow*: ``pyarrow.dataset``, made into tensors, in the order of the files;
- *petastorm*: ``BatchedDataLoader``, with a queue of 100,000 rows. It needs an old pyarrow, so
  ``--petastorm`` names the interpreter of an environment of its own;
- *datasets*, *streaming*, *litdata*: of Hugging Face, MosaicML and Lightning, shuffled. Those that
  the interpreter of ``--peers`` does not have are left out.

Also measured of *nbelastic*: the first batch in the middle of an epoch; how long ranks wait for
their next step when one of four is lost; bytes read over bytes needed, by a file system that
counts; and the peak of a process's memory, over its bound, when one rank takes over all streams.
Exits with 1 if a target is missed, with 2 if something could not be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import torch
from fsspec.implementations.local import LocalFileSystem

from benchmarks.command import options_of, run
from benchmarks.figures import Target, bootstrap, quartiles, table
from benchmarks.side_by_side import ROOT, Failed
from nbelastic.data import Batch, Loader, Parquet
from nbelastic.elastic.ranks.context import Context, activate

ROWS, GROUPS, FEATURES, BATCH = 500_000, 10, 16, 256
SHARES = (8, 9, 11, 12)
MICRO_BATCHES = 4
MEMORY = 64_000_000
LEAST_TORCH, LEAST_PETASTORM = 20.0, 2.0
PEERS = ("datasets", "streaming", "litdata")
MOST_RESUME, MOST_WAIT_MS, MOST_BYTES, MOST_MEMORY = 1.5, 50.0, 1.1, 1.0

Round = dict[str, float]


def main() -> int:
    if sys.argv[1:2] == ["--peak"]:
        print(json.dumps(peak(Path(sys.argv[2]))))
        return 0
    parser = options_of("data", __doc__, rounds=9, budget=60.0)
    parser.add_argument("--petastorm", metavar="PYTHON", help="interpreter that has petastorm")
    more = "interpreter that has datasets, mosaicml-streaming or litdata (this one)"
    parser.add_argument("--peers", metavar="PYTHON", default=sys.executable, help=more)
    parser.set_defaults(ranks=[1])
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.ranks = 2, options.ranks[:1]
    torch.set_num_threads(1)
    rows = ROWS // 10 if options.quick else ROWS
    with tempfile.TemporaryDirectory() as where, tempfile.TemporaryDirectory() as scratch:
        write(Path(where), rows)
        measured = functools.partial(measure, options, Path(where), Path(scratch), rows)
        return run(options.ranks, options.json, measured, show, aims)


def write(where: Path, rows: int) -> None:
    """Write files of differing sizes, so that streams are cut within row groups."""
    rng = np.random.default_rng(0)
    first = 0
    for number, share in enumerate(SHARES):
        part = rows * share // sum(SHARES)
        columns = {
            "id": np.arange(first, first + part),
            **{f"x{i}": rng.normal(size=part).astype(np.float32) for i in range(FEATURES)},
            "y": rng.integers(0, 10, part),
        }
        pq.write_table(
            pa.table(columns), where / f"{number}.parquet", row_group_size=part // GROUPS
        )
        first += part


def source(url: Any, memory: int | str = "256 MB") -> Parquet:
    return Parquet(str(url), ["id", "x*", "y"], memory=memory)


def loader_of(data: Parquet) -> Loader:
    return Loader(data, Batch(BATCH * MICRO_BATCHES, micro=BATCH, exact=False))


def ours(data: Parquet) -> Iterator[int]:
    for step in loader_of(data):
        for ids, _, _ in step:
            yield len(ids)


def tensors(where: Path) -> torch.utils.data.TensorDataset:
    found = pq.read_table(where)
    features = np.stack([found[f"x{i}"].to_numpy() for i in range(FEATURES)], axis=1)
    ids, labels = (torch.from_numpy(found[name].to_numpy().copy()) for name in ("id", "y"))
    return torch.utils.data.TensorDataset(ids, torch.from_numpy(features), labels)


def of_torch(data: Any) -> Iterator[int]:
    for ids, _, _ in torch.utils.data.DataLoader(data, BATCH, shuffle=True):
        yield len(ids)


def of_pyarrow(where: Path) -> Iterator[int]:
    for batch in pyarrow.dataset.dataset(where).to_batches(batch_size=BATCH, use_threads=False):
        columns = [np.array(column.to_numpy()) for column in batch.columns]
        torch.from_numpy(np.stack(columns[1:-1], axis=1))
        for column in (columns[0], columns[-1]):
            torch.from_numpy(column)
        yield batch.num_rows


def timed(batches: Iterator[int], most: int) -> tuple[float, float]:
    """Return rows a second, and milliseconds to the first batch; of about `most` rows."""
    begun = time.perf_counter()
    rows = next(batches)
    first = time.perf_counter() - begun
    for count in batches:
        rows += count
        if rows >= most:
            break
    return rows / (time.perf_counter() - begun), first * 1e3


def measure(
    options: argparse.Namespace, where: Path, scratch: Path, rows: int, _: int
) -> dict[str, Any]:
    """Return rows a second and milliseconds by candidate, and the other figures, by round."""
    data, memory = source(where), tensors(where)
    candidates: dict[str, Callable[[], tuple[float, float]]] = {
        "nbelastic": lambda: timed(ours(data), rows),
        "torch": lambda: timed(of_torch(memory), rows // 5),  # it is steady, and slow
        "pyarrow": lambda: timed(of_pyarrow(where), rows),
    }
    if options.petastorm:
        candidates["petastorm"] = lambda: petastorm(options.petastorm, where)
    for name in PEERS:
        most = rows if name == "datasets" else rows // 20  # the others are steady, and slower
        measured = functools.partial(peer, options.peers, name, where, scratch, most)
        try:
            measured()  # converts the rows, and warms up
        except ModuleNotFoundError as missing:
            print(missing, flush=True)
        else:
            candidates[name] = measured
    rounds: list[Round] = []
    for name, candidate in candidates.items():
        if name not in PEERS:
            candidate()  # once to warm up
    for number in range(options.rounds):
        found: Round = {}
        names = list(candidates)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name], found[f"{name} first"] = candidates[name]()
        for part in (0.0, 0.5) if number % 2 else (0.5, 0.0):
            found["resume" if part else "first"] = first_batch(data, part)
        found["wait"] = lose_one(data)
        rounds.append(found)
    found = {"rounds": rounds, "bytes": bytes_read(where), "memory": memory_peak(where)}
    return {"parquet": found}


def petastorm(python: str, where: Path) -> tuple[float, float]:
    """Measure in an environment that has petastorm."""
    found = printed_by(where, python, "data_petastorm.py", where, BATCH)
    return found["rows"], found["first"]


def peer(python: str, name: str, where: Path, scratch: Path, most: int) -> tuple[float, float]:
    """Measure in an environment that may have other loaders.

    Raises
    ------
    ModuleNotFoundError
        It lacks this one.
    """
    found = printed_by(scratch, python, "data_peers.py", name, where, scratch, BATCH, most)
    if "missing" in found:
        raise ModuleNotFoundError(f"{found['missing']} is not installed for {python}: left out")
    return found["rows"], found["first"]


def printed_by(cwd: Path, python: str, script: str, *arguments: object) -> dict[str, Any]:
    """Run a script, which may find torch where this process has it; return what it prints."""
    path = Path(__file__).with_name(script)
    command = [python, str(path), *map(str, arguments), *map(str, torch.__path__)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    if result.returncode:
        raise Failed(result.stderr)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def first_batch(data: Parquet, part: float) -> float:
    """Return milliseconds to the first batch of a new loader, after a part of an epoch."""
    loader = loader_of(data)
    loader.load_state_dict({**loader.state_dict(), "step": int(len(loader) * part)})
    begun = time.perf_counter()
    steps = iter(loader)  # kept: to give it up takes until the thread has read its window
    next(iter(next(steps)))
    return (time.perf_counter() - begun) * 1e3


def lose_one(data: Parquet) -> float:
    """Return the milliseconds for which the slowest of three ranks waits for its next step.

    Rank 3 of four is lost in the middle of the epoch. Ranks are loaders of this process, and get
    their rows one after the other, as on machines of their own.
    """
    loaders = [loader_of(data) for _ in range(4)]
    middle = len(loaders[0]) // 2
    for rank, loader in enumerate(loaders):
        loader.step = middle - 5
        with activate(context(rank, 4)):
            for step in loader:
                list(step)
                if step.number == middle:
                    break
    waits = []
    for rank, loader in enumerate(loaders[:3]):
        with activate(context(rank, 3)):
            begun = time.perf_counter()
            steps = iter(loader)
            list(next(steps))
            waits.append(time.perf_counter() - begun)
    return max(waits) * 1e3


def context(rank: int, size: int) -> Context:
    found = Context()
    found.rank, found.size = rank, size
    return found


class Counting(LocalFileSystem):
    """File system that counts what is read."""

    protocol = "counting"
    read: ClassVar[Counter[str]] = Counter()

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return CountedFile(path, mode)


class CountedFile(io.FileIO):
    """File that counts what is read."""

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size)
        Counting.read[str(self.name)] += len(found)
        return found


def bytes_read(where: Path) -> float:
    """Return the bytes that an epoch on four ranks reads, over those of the columns it needs."""
    fsspec.register_implementation("counting", Counting, clobber=True)
    data = Parquet(f"counting://{where}", ["x*", "y"])
    Counting.read.clear()
    for rank in range(4):
        with activate(context(rank, 4)):
            for step in loader_of(data):
                list(step)
    needed = sum(
        column.total_compressed_size
        for file in where.glob("*.parquet")
        for column in columns_of(pq.read_metadata(file))
        if column.path_in_schema != "id"
    )
    return sum(Counting.read.values()) / needed


def columns_of(footer: Any) -> Iterator[Any]:
    for group in range(footer.num_row_groups):
        for number in range(footer.num_columns):
            yield footer.row_group(group).column(number)


def memory_peak(where: Path) -> float:
    """Return the rise of a process's memory, over the bound that the source was given."""
    command = [sys.executable, "-m", "benchmarks.data", "--peak", str(where)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if result.returncode:
        raise Failed(result.stderr)
    return float(json.loads(result.stdout))


def peak(where: Path) -> float:
    """Train as one of four ranks, then alone; return the rise of this process's memory."""
    torch.set_num_threads(1)
    data = source(where, MEMORY)
    pa.set_memory_pool(pa.system_memory_pool())  # the others keep what they free
    data.read(0)  # what is needed once: pages of code, buffers of the decoder
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before = resident("VmRSS")
    loader = loader_of(data)
    for rank, size, steps in ((0, 4, len(loader) // 3), (0, 1, len(loader))):
        with activate(context(rank, size)), contextlib.suppress(StopIteration):
            iterator = iter(loader)
            for _ in range(steps):
                list(next(iterator))
    return (resident("VmHWM") - before) / MEMORY


def resident(name: str) -> int:
    """Return bytes of this process's resident memory: now, or at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def show(_: int, worlds: dict[str, Any]) -> None:
    world = worlds["parquet"]
    rounds = world["rounds"]
    order = ("nbelastic", "petastorm", *PEERS, "torch", "pyarrow")
    names = [name for name in order if name in rounds[0]]
    rows = []
    for name in names:
        rates = quartiles([each[name] / 1e3 for each in rounds])
        firsts = quartiles([each[f"{name} first"] for each in rounds])
        rows.append([name, rates.show(), firsts.show()])
    print(table(["", "thousand rows/s", "first batch, ms"], rows))
    print(f"resume in the middle: {quartiles([r['resume'] for r in rounds]).show()} ms")
    print(f"one of four is lost: {quartiles([r['wait'] for r in rounds]).show()} ms")
    print(f"bytes read over needed: {world['bytes']:.3f}; memory over bound: {world['memory']:.2f}")


def aims(_: int, worlds: dict[str, Any]) -> list[Target]:
    world = worlds["parquet"]
    rounds = world["rounds"]

    def ratio(name: str, other: str) -> float:
        return bootstrap(
            rounds, lambda some: statistics.median(r[name] / r[other] for r in some)
        ).median

    found = [
        Target(
            "rows a second, over torch in memory", ratio("nbelastic", "torch"), LEAST_TORCH, True
        )
    ]
    if "petastorm" in rounds[0]:
        found.append(
            Target(
                "rows a second, over petastorm",
                ratio("nbelastic", "petastorm"),
                LEAST_PETASTORM,
                True,
            )
        )
    for name in PEERS:
        if name in rounds[0]:
            found.append(Target(f"rows a second, over {name}", ratio("nbelastic", name), 1.0, True))
    resumed = ratio("resume", "first")
    wait = statistics.median(each["wait"] for each in rounds)
    return [
        *found,
        Target("resume over a first batch", resumed, MOST_RESUME, False),
        Target("milliseconds that ranks wait when one of four is lost", wait, MOST_WAIT_MS, False),
        Target("bytes read over bytes needed", world["bytes"], MOST_BYTES, False),
        Target("peak of memory over its bound", world["memory"], MOST_MEMORY, False),
    ]


if __name__ == "__main__":
    sys.exit(main())
