"""Processes with the commands installed, as a package installs them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def installed(folder: Path) -> dict[str, str]:
    """Return an environment in which the entry points of pyproject.toml are installed.

    The package itself may be installed from an older state of its metadata, so they are written to
    a folder on the path of a distribution of their own.
    """
    metadata = folder / "nbelastic_entry_points-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nbelastic_entry_points\nVersion: 1\n"
    )
    (metadata / "entry_points.txt").write_text("\n".join(_lines()))
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(folder), str(ROOT), before]))
    return {**os.environ, "PYTHONPATH": path}


def _lines() -> Iterator[str]:
    for group, names in PROJECT["entry-points"].items():
        yield f"[{group}]"
        for name, target in names.items():
            yield f"{name} = {target}"
