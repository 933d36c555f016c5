"""The README's first program, as a reader pastes it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
