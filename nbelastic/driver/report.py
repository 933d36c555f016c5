"""Report of a job in one file, for an issue or a colleague."""

from __future__ import annotations

import dataclasses
import json
import traceback
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbelastic.elastic.redaction import HIDDEN, Secrets

from .versions import versions

if TYPE_CHECKING:
    import os

    from .job import Job
    from .options import Options

MOST_OUTPUT = 1_000_000
"""Characters of output in a report: the newest."""


def save_report(job: Job, options: Options, path: str | os.PathLike[str]) -> Path:
    """Write history, status, versions, options, error and newest output to a ZIP file."""
    parts = {
        "versions.json": _json(versions()),
        "options.json": _json(
            {**dataclasses.asdict(options), "env": dict.fromkeys(options.env, HIDDEN)}
        ),
        "status.json": _json(dataclasses.asdict(job.status)),
        "history.json": _json([dataclasses.asdict(event) for event in job.history]),
        "output.txt": job.logs()[-MOST_OUTPUT:],
    }
    error = job.exception() if job.done() else None
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
