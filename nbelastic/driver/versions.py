"""Versions of nbelastic and its environment, for the report of a fault."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

from nbelastic.collectives import missing_native_part

from .status import aligned

PACKAGES = (
    "nbelastic torch dask distributed cloudpickle fsspec msgpack msgspec numpy tornado "
    "ipykernel ipywidgets jupyterlab pygloo"
)


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
