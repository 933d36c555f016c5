"""Modules of the notebook's folder, on workers that cannot see it and on those that can."""

import sys

import pytest

from nbelastic.errors import RankFailed
from tests.notebook.fakes import run

HELPERS = """
from dataclasses import dataclass

@dataclass
class Answer:
    version: int

def answer():
    from models.inner import scale
    return Answer(VERSION * scale)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The notebook's folder, which the workers of ``crew`` do not see."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "inner.py").write_text("from . import base\nscale = base.scale\n")
    (tmp_path / "models" / "base.py").write_text("scale = 10\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("helpers", "models", "models.inner", "models.base", "private"):
        sys.modules.pop(name, None)


def edit(folder, version):
    (folder / "helpers.py").write_text(HELPERS.replace("VERSION", str(version)))


def test_modules_travel_with_each_job_and_edits_count(crew, shell, folder):
    edit(folder, 1)
    shell.user_ns["client"] = crew.client
    run(shell, "import nbelastic\nfrom helpers import answer, Answer")
    cell = "%%elastic_train --cluster client --np 2 -o job --stream none --verbose\nanswer()"
    first = run(shell, cell).result
    assert first.version == 10
    assert type(first) is sys.modules["helpers"].Answer
    assert set(shell.user_ns["job"].modules.sources) == {
        *("helpers", "models", "models.inner", "models.base")
    }
    edit(folder, 222)
    assert run(shell, cell).result.version == 2220
    lazily = cell.replace("\nanswer()", "\nimport helpers\nhelpers.answer().version")
    edit(folder, 3)
    assert run(shell, lazily).result == 30
    assert not any(crew.client.run(lambda: "helpers" in sys.modules).values())


def test_a_module_that_did_not_travel_is_named_with_the_reason(crew, folder):
    (folder / "private.py").write_text("key = 1")
    (folder / ".gitignore").write_text("private.py\n")

    def train():
        import private

        return private.key

    with pytest.raises(RankFailed, match=r"private did not travel.*gitignore") as caught:
        crew.fit(train, np=2)
    assert isinstance(caught.value, ModuleNotFoundError)
