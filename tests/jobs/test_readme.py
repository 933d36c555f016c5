"""Programs of the documents, as a reader pastes them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parents[2] / "docs/recipes.md"
README = Path(__file__).parents[2] / "README.md"


def test_the_first_program_of_the_readme_runs_as_a_script(tmp_path):
    program = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert program is not None
    script = tmp_path / "first.py"
    script.write_text(program[1])
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=150, check=False
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 0.01
    assert "finished · 4 ranks" in run.stderr


def test_the_functions_of_the_recipes_run(crew):
    programs = re.findall(r"```python\n(def train.*?)```", RECIPES.read_text(), re.DOTALL)
    results = []
    for program in programs:
        names: dict[str, Any] = {}
        exec(compile(program, "recipe", "exec"), names)
        results.append(crew.fit(names["train"], np=2).result())
    weights, steps, best = results
    assert set(weights) == {"weight", "bias"} and steps == 20 and best < float("inf")
