"""Programs of the documents, as a reader pastes them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RECIPES = Path(__file__).parents[2] / "docs/recipes.md"
TRAINERS = Path(__file__).parents[2] / "docs/trainers.md"
README = Path(__file__).parents[2] / "README.md"


def run(program: str, folder: Path, *how: str, **variables: str) -> Any:
    """Run a program of a page as a script, which must succeed."""
    script = folder / "script.py"
    script.write_text(program)
    ended = subprocess.run(
        [sys.executable, *how, str(script)],
        env={**os.environ, "PYTHONPATH": str(README.parent), **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended


def first_program(page: Path, begins: str = "") -> str:
    found = re.search(rf"```python\n({begins}.*?)```", page.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_first_program_of_the_readme_runs_as_a_script(tmp_path):
    forked = {"DASK_DISTRIBUTED__NANNY__PRELOAD": "['tests.support.forking']"}
    ended = run(first_program(README), tmp_path, **forked)
    assert float(ended.stdout) < 0.01
    assert "finished · 4 ranks" in ended.stderr


@pytest.mark.nightly
def test_the_script_of_the_page_on_trainers_goes_on_after_a_kill(tmp_path):
    kill = (
        "state.commit()\n            killed = pathlib.Path('killed')\n"
        "            if state.epoch == 1 and dist.get_rank() == 0 and not killed.exists():\n"
        "                killed.touch(), os.kill(os.getpid(), 9)\n"
    )
    program = first_program(TRAINERS, "import torch\n").replace("state.commit()", kill)
    how = ["-m", "nbelastic.cli", "run", "-np", "2", "--min-np", "1", sys.executable]
    ended = run(f"import os, pathlib\n{program}", tmp_path, *how)
    losses = dict(re.findall(r"epoch (\d): loss (\d\.\d+)", ended.stdout))
    assert [0.5 < float(losses[str(epoch)]) < 2.0 for epoch in range(3)] == [True] * 3
    assert (tmp_path / "model.pt").exists()


def test_the_functions_of_the_recipes_run(crew):
    programs = re.findall(r"```python\n(def train.*?)```", RECIPES.read_text(), re.DOTALL)
    results = []
    for program in programs:
        names: dict[str, Any] = {}
        exec(compile(program, "recipe", "exec"), names)
        results.append(crew.fit(names["train"], np=2).result())
    weights, steps, best = results
    assert set(weights) == {"weight", "bias"} and steps == 20 and best < float("inf")
