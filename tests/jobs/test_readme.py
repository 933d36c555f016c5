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


def test_the_first_program_of_the_readme_runs_as_a_script(tmp_path):
    program = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert program is not None
    script = tmp_path / "first.py"
    script.write_text(program[1])
    forked = {"DASK_DISTRIBUTED__NANNY__PRELOAD": "['tests.support.forking']"}
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(README.parent), **forked},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 0.01
    assert "finished · 4 ranks" in run.stderr


@pytest.mark.nightly
def test_the_script_of_the_page_on_trainers_goes_on_after_a_kill(tmp_path):
    program = re.search(r"```python\n(import torch\n.*?)```", TRAINERS.read_text(), re.DOTALL)
    assert program is not None
    script = tmp_path / "train.py"
    killed = "pathlib.Path('killed')"
    kill = (
        f"if state.epoch == 1 and dist.get_rank() == 0 and not {killed}.exists():\n"
        f"                {killed}.touch(), os.kill(os.getpid(), 9)\n"
    )
    script.write_text(
        "import os, pathlib\n"
        + program[1].replace("state.commit()", f"state.commit()\n            {kill}")
    )
    words = [sys.executable, "-m", "nbelastic.cli", "run", "-np", "2", "--min-np", "1"]
    run = subprocess.run(
        [*words, sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    losses = dict(re.findall(r"epoch (\d): loss (\d\.\d+)", run.stdout))
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
