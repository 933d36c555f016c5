"""The rules of the house: who may import whom, and what an import costs."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = 14
"""Most modules of a folder, without its door; a room that has more gets sub-rooms."""


def test_a_folder_has_few_modules():
    package = ROOT / "nbelastic"
    count = Counter(
        str(path.parent.relative_to(package))
        for path in package.rglob("*.py")
        if path.name != "__init__.py"
    )
    assert not {room: n for room, n in count.items() if n > MODULES}


@pytest.mark.slow
def test_rooms_import_only_from_lower_floors():
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_public_names_are_what_they_are_in_their_rooms():
    code = (
        "import nbelastic, types; "
        "print([n for n in nbelastic.__all__ if n not in ('elastic', 'errors') "
        "and not n.endswith('ipython_extension') "
        "and (isinstance(getattr(nbelastic, n), types.ModuleType) "
        "or n not in [*nbelastic.driver.__all__, *nbelastic.elastic.__all__])], "
        "nbelastic.report is nbelastic.elastic.report, nbelastic.chaos.Fault.__name__)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[] True Fault"


@pytest.mark.slow
def test_import_loads_neither_torch_nor_ipython_nor_ipywidgets():
    code = (
        "import nbelastic, sys; "
        "print([m for m in ('torch', 'IPython', 'ipywidgets') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
