"""Reports of faults: a job in a ZIP file, and the versions of this environment."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
import traceback
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nbelastic.collectives import missing_native_part
from nbelastic.elastic.redaction import HIDDEN, Secrets

from .options import Options
from .status import HistoryEvent, JobStatus, aligned

MOST_OUTPUT = 1_000_000  # characters of output in a report: the newest

PACKAGES = (
    "nbelastic torch dask distributed cloudpickle fsspec msgpack msgspec numpy tornado "
    "ipykernel ipywidgets jupyterlab pygloo"
)


def save_report(
    path: str | os.PathLike[str],
    options: Options,
    status: JobStatus,
    history: Iterable[HistoryEvent],
    output: str,
    error: BaseException | None,
) -> Path:
    """Write history, status, versions, options, error and newest output to a ZIP file."""
    parts = {
        "versions.json": _json(versions()),
        "options.json": _json(
            {**dataclasses.asdict(options), "env": dict.fromkeys(options.env, HIDDEN)}
        ),
        "status.json": _json(dataclasses.asdict(status)),
        "history.json": _json(list(map(dataclasses.asdict, history))),
        "output.txt": output[-MOST_OUTPUT:],
    }
    if error is not None:
        parts["error.txt"] = "".join(traceback.format_exception(error))
    secrets = Secrets([options.checkpoint or ""], options.env)
    target = Path(path)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, secrets.hide(text).encode("utf-8", "backslashreplace"))
    return target


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def versions() -> dict[str, str]:
    """Return the versions in this process, by name; ``missing`` for what is not installed."""
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
    return found


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
    sys.stdout.write(aligned(list(versions().items())) + "\n")
