"""Versions of nbelastic and what it runs on, for reports of faults."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

from nbelastic.collectives import missing_native_part

PACKAGES = (
    "nbelastic",
    "torch",
    "dask",
    "distributed",
    "cloudpickle",
    "fsspec",
    "msgpack",
    "msgspec",
    "numpy",
    "tornado",
    "ipykernel",
    "ipywidgets",
    "jupyterlab",
    "pygloo",
)


def versions() -> dict[str, str]:
    """Return the versions in this process, by name; ``missing`` for what is not installed."""
    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": str(os.cpu_count()),
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    found["shared memory"] = missing_native_part() or "built"
    return found


def show_versions() -> None:
    """Print the versions of nbelastic and what it runs on, as a report of a fault needs them.

    ``shared memory`` says whether the native part was built, else why it is missing here: ranks
    on this machine then use Gloo. What workers run is compared when a job starts.

    Examples
    --------
    >>> nbelastic.show_versions()  # doctest: +SKIP
    python         3.11.7
    system         Linux 6.8.0 x86_64
    ...
    """
    rows = versions()
    width = max(map(len, rows))
    sys.stdout.write("".join(f"{name:<{width}}  {value}\n" for name, value in rows.items()))
