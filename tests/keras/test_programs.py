"""Horovod's documented programs, with only their import changed, under a kill and a join."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

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
