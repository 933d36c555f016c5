"""Rows a second of petastorm's ``BatchedDataLoader``; run by :mod:`benchmarks.data`.

Runs in an environment of its own, with petastorm 0.12 and pyarrow 12. Torch may come from another.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

QUEUE = 100_000


def main() -> None:
    where, batch, torch = sys.argv[1:4]
    sys.path.append(str(Path(torch).parent))
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    with make_batch_reader(f"file://{where}", num_epochs=1, shuffle_row_groups=True) as reader:
        loader = BatchedDataLoader(reader, int(batch), shuffling_queue_capacity=QUEUE)
        begun, rows, first = time.perf_counter(), 0, 0.0
        for each in loader:
            first = first or time.perf_counter() - begun
            rows += len(each["id"])
        seconds = time.perf_counter() - begun
    print(json.dumps({"rows": rows / seconds, "first": first * 1e3}))


if __name__ == "__main__":
    main()
