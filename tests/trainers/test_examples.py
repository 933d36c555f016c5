"""The examples of trainers run, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"

pytest.importorskip("lightning")
pytest.importorskip("transformers")


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_trains(crew, tmp_path, name):
    def train(path, directory):
        import os
        import runpy

        os.chdir(directory)
        runpy.run_path(path, run_name="__main__")

    job = crew.fit(train, args=(str(EXAMPLES / name), str(tmp_path)), np=2)
    assert job.status.commits > 4
    assert job.status.warnings == ()


def test_at_most_three_lines_are_new():
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert 1 <= text.count("# new") + text.count("# was") <= 3, path.name
