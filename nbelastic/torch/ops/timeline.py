"""Recording of what ranks do, with Horovod's names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nbelastic.elastic.ranks.context import current
from nbelastic.elastic.ranks.timeline import timeline, write
from nbelastic.torch.ops.broadcast import allgather_object

if TYPE_CHECKING:
    from pathlib import Path


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record operations, steps, commits and resets of this rank from here on.

    Where the job records all (``fit(timeline=...)``), this and :func:`stop_timeline` do nothing.

    Parameters
    ----------
    file_path : str or path
        Where rank 0 writes the timeline of all ranks, in Chrome's trace format, which
        https://ui.perfetto.dev opens. Each rank has a row.
    mark_cycles : bool, default False
        Whether to mark when operations begin to be compared.
    """
    if not timeline.is_on:
        timeline.start(file_path, current().rank, marks_cycles=mark_cycles)


def stop_timeline() -> Path | None:
    """Stop recording; all ranks call it, and rank 0 writes the file.

    Returns
    -------
    Path or None
        The file, on rank 0.
    """
    if not timeline.is_on or timeline.is_the_jobs:
        return None
    everyone = allgather_object(timeline.stop())
    path = timeline.path
    if current().rank != 0 or path is None:
        return None
    write(path, [event for events in everyone for event in events])
    return path
