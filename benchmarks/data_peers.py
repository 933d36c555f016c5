"""Rows a second of other loaders that can resume; run by :mod:`benchmarks.data`.

Runs in an environment of its own, which has some of the packages ``datasets``, ``litdata`` and
``mosaicml-streaming``. Torch, NumPy and pyarrow may come from another. The rows are converted to
the formats of the last two once, before anything is timed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUEUE = 100_000
FEATURES = [f"x{number}" for number in range(16)]
PACKAGES = {"datasets": "datasets", "streaming": "mosaicml-streaming", "litdata": "litdata"}

Row = dict[str, Any]


def main() -> None:
    name, where, scratch, batch, most, torch = sys.argv[1:7]
    sys.path.append(str(Path(torch).parent))
    warnings.simplefilter("ignore")
    if importlib.util.find_spec(name) is None:
        print(json.dumps({"missing": PACKAGES[name]}))
        return
    begin = {"datasets": of_datasets, "streaming": of_streaming, "litdata": of_litdata}[name]
    batches = begin(Path(where), Path(scratch) / name, int(batch))
    next(iter(batches()))  # once to warm up
    begun, rows, first = time.perf_counter(), 0, 0.0
    for count in batches():
        first = first or time.perf_counter() - begun
        rows += count
        if rows >= int(most):
            break
    seconds = time.perf_counter() - begun
    found = {"rows": rows / seconds, "first": first * 1e3}
    print(json.dumps({**found, "version": importlib.metadata.version(PACKAGES[name])}))


def of_datasets(where: Path, scratch: Path, batch: int) -> Any:
    import datasets
    import torch

    datasets.disable_progress_bars()
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
    data = datasets.load_dataset(
        "parquet",
        data_files=[str(file) for file in sorted(where.glob("*.parquet"))],
        split="train",
        streaming=True,
        cache_dir=str(scratch),
    )

    def batches() -> Iterator[int]:
        shuffled = data.shuffle(seed=1, buffer_size=QUEUE).with_format("torch")
        for each in shuffled.iter(batch_size=batch):
            torch.stack([each[name] for name in FEATURES], dim=1)
            yield len(each["id"])

    return batches


def of_streaming(where: Path, scratch: Path, batch: int) -> Any:
    import torch
    from streaming import MDSWriter, StreamingDataset

    columns = {"id": "int64", "x": "ndarray:float32:16", "y": "int64"}
    if not scratch.exists():
        with MDSWriter(out=str(scratch), columns=columns, size_limit="4mb") as writer:
            for row in rows_of(where):
                writer.write(row)

    def batches() -> Iterator[int]:
        data = StreamingDataset(
            local=str(scratch), shuffle=True, batch_size=batch, shuffle_block_size=QUEUE
        )
        for each in torch.utils.data.DataLoader(data, batch_size=batch):
            yield len(each["id"])

    return batches


def of_litdata(where: Path, scratch: Path, batch: int) -> Any:
    import litdata

    if not scratch.exists():
        litdata.optimize(
            fn=rows_of_file,
            inputs=[str(file) for file in sorted(where.glob("*.parquet"))],
            output_dir=str(scratch),
            chunk_bytes="4MB",
            num_workers=1,
            verbose=False,
        )

    def batches() -> Iterator[int]:
        data = litdata.StreamingDataset(str(scratch), shuffle=True)
        for each in litdata.StreamingDataLoader(data, batch_size=batch):
            yield len(each["id"])

    return batches


def rows_of(where: Path) -> Iterator[Row]:
    for file in sorted(where.glob("*.parquet")):
        yield from rows_of_file(str(file))


def rows_of_file(file: str) -> Iterator[Row]:
    import numpy as np
    import pyarrow.parquet as pq

    found = pq.read_table(file)
    features = np.stack([found[name].to_numpy() for name in FEATURES], axis=1)
    for row, x, y in zip(found["id"].to_pylist(), features, found["y"].to_pylist(), strict=True):
        yield {"id": row, "x": x, "y": y}


if __name__ == "__main__":
    main()
