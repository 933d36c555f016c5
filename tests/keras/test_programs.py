"""Horovod's documented programs, with only their import changed, under a kill and a join."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.keras.conftest import BACKEND
from tests.support.clusters import kinds, sizes

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"
NAME, EPOCHS = ("tape", 5) if BACKEND == "tensorflow" else ("digits", 6)


@pytest.mark.backends("torch", "tensorflow")
def test_by_fit(keras_crew, tmp_path):
    text = (SCRIPTS / f"{NAME}.py").read_text().replace("import horovod.", "import nbelastic.")

    def program():
        exec(compile(text, "program.py", "exec"), {"__name__": "__main__"})

    job = keras_crew.fit(program, np=3, min_np=2, env={"MARKS": str(tmp_path)})
    assert sizes(job)[:2] == [3, 2]
    assert kinds(job).count("lost") == 1
    ended = re.findall(r"done epoch=(\d+) size=\d (.*)", job.logs())
    assert set(ended) == {(str(EPOCHS), ended[0][1])}
    assert (tmp_path / "checkpoint.keras").exists() == (NAME == "digits")
    size, epoch, batch = (tmp_path / "resets").read_text().split()[:3]
    assert (size, epoch) == ("2", "1")
    assert int(batch) > 0
