"""Horovod's documented programs, with only their import changed, under a kill and a join."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import installed
from tests.keras.conftest import BACKEND
from tests.support.clusters import kinds, sizes

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"
NAME, EPOCHS = ("tape", 5) if BACKEND == "tensorflow" else ("digits", 6)


def program(name: str) -> str:
    """Return the text of a program that imports nbelastic."""
    return (SCRIPTS / f"{name}.py").read_text().replace("import horovod.", "import nbelastic.")


class Call:
    """A program as a function."""

    def __init__(self, name: str, marks: Path) -> None:
        self.text = program(name)
        self.marks = str(marks)

    def __call__(self) -> None:
        os.environ["MARKS"] = self.marks
        exec(compile(self.text, "program.py", "exec"), {"__name__": "__main__"})


def done(output: str) -> list[dict[str, str]]:
    """Return what ranks have printed at their end."""
    found = re.findall(r"done (.*)", output)
    return [dict(pair.split("=") for pair in line.split()) for line in found]


def check(ended: list[dict[str, str]], epochs: int) -> None:
    assert len(ended) >= 1
    for each in ended:
        assert int(each["epoch"]) == epochs
        for name in ("iterations", "weights", "rate"):
            assert each[name] == ended[0][name], name


@pytest.mark.backends("torch", "tensorflow")
def test_by_fit(keras_crew, tmp_path):
    job = keras_crew.fit(Call(NAME, tmp_path), np=3, min_np=2)
    assert sizes(job)[:2] == [3, 2]
    assert kinds(job).count("lost") == 1
    check(done(job.logs()), EPOCHS)
    assert (tmp_path / "checkpoint.keras").exists() == (NAME == "digits")
    size, epoch, batch = (tmp_path / "resets").read_text().split()[:3]
    assert (size, epoch) == ("2", "1")
    assert int(batch) > 0


@pytest.mark.backends("tensorflow")
def test_faults_by_hand(keras_crew, tmp_path):
    job = keras_crew.fit(Call("by_hand", tmp_path), np=2)
    ended = done(job.logs())
    assert [each["caught"] for each in ended] == ["UnknownError"] * len(ended)


@pytest.mark.backends("torch")
def test_by_a_cell(keras_crew, tmp_path):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    try:
        shell.run_line_magic("load_ext", "nbelastic")
        shell.user_ns["crew_client"] = keras_crew.client
        text = program("digits").replace('os.environ["MARKS"]', repr(str(tmp_path)))
        line = "--np 3 --min-np 2 --cluster crew_client --out job"
        result = shell.run_cell(f"%%elastic_train {line}\n{text}")
        assert result.success, result.error_in_exec
        job = shell.user_ns["job"]
        assert sizes(job)[:2] == [3, 2]
        check(done(job.logs()), 6)
    finally:
        InteractiveShell.clear_instance()


@pytest.mark.backends("torch", "tensorflow")
def test_by_the_terminal(tmp_path):
    words = ["elastic", "run", "-np", "3", "--min-np", "2", "--json"]
    command = ["python", str(SCRIPTS / f"{NAME}.py")]
    code = "import sys; from dask.__main__ import main; sys.exit(main())"
    ended = subprocess.run(
        [sys.executable, "-c", code, *words, *command],
        env={**installed(tmp_path / "entry"), "MARKS": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [each["size"] for each in found if each.get("kind") == "formed"][:2] == [3, 2]
    text = "\n".join(each.get("text", "") for each in found)
    check(done(text), EPOCHS)
