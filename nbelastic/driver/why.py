"""Answers to a user with a problem: decisions on a job, and versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable

from nbelastic.collectives import missing_native_part
from nbelastic.status import HistoryEvent, aligned

MOST = 20  # decisions that are shown, the newest

_NO_DECISIONS = ("formed", "phases", "checkpoint", "alias")  # kinds in the history

PACKAGES = (
    "nbelastic torch dask distributed cloudpickle fsspec msgpack msgspec numpy tornado "
    "ipykernel ipywidgets jupyterlab pygloo"
)


class Explanation(str):
    """A text, shown unquoted in a notebook."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain(job: str, history: Iterable[HistoryEvent], rank: int | None = None) -> Explanation:
    """Return the newest decisions on a job or a rank, with what was seen."""
    found = [event for event in history if event.kind not in _NO_DECISIONS]
    if rank is not None:
        found = [event for event in found if event.rank == rank]
    whose = f"job {job!r}" if rank is None else f"rank {rank} of job {job!r}"
    if not found:
        return Explanation(f"{whose}: nothing was decided so far")
    lines = [f"{whose}, the newest decision last:"]
    for event in found[-MOST:]:
        seen = f"\nseen by {event.seen}" * bool(event.seen)
        lines.append(f"{event} (generation {event.generation}){seen}".replace("\n", "\n    "))
    return Explanation("\n".join(lines))


def show_versions() -> None:
    """Print the versions of nbelastic and its environment, for a report of a fault.

    ``shared memory`` says whether the native part was built, else why it is missing here: ranks
    on this machine then use Gloo. What workers run is compared when a job starts.

    Examples
    --------
    >>> nbelastic.show_versions()  # doctest: +SKIP
    python         3.11.7
    system         Linux 6.8.0 x86_64
    ...
    """
    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": str(os.cpu_count()),
    }
    for package in PACKAGES.split():
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    found["shared memory"] = missing_native_part() or "built"
    sys.stdout.write(aligned(list(found.items())) + "\n")
