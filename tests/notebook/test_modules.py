"""Modules of the notebook's folder, on workers that cannot see it and on those that can."""

from __future__ import annotations

import sys

import pytest

import nbelastic
from nbelastic.errors import RankFailed
from tests.notebook.shells import run

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


def test_an_edited_module_is_reloaded_and_tasks_keep_the_old_one(crew, folder):
    def import_it(path):
        sys.path.insert(0, path)
        import helpers

        return helpers.answer().version

    edit(folder, 1)
    try:
        assert set(crew.client.run(import_it, str(folder)).values()) == {10}
        edit(folder, 222)
        import helpers

        job = crew.fit(helpers.answer, np=2)
        assert [result.version for result in job.results()] == [2220, 2220]
        assert set(crew.client.run(lambda: sys.modules["helpers"].answer().version).values()) == {
            10
        }
    finally:
        crew.client.run(forget, str(folder))


def forget(path):
    sys.path.remove(path)
    for name in ("helpers", "models", "models.inner", "models.base"):
        sys.modules.pop(name, None)


def test_two_jobs_at_once_have_their_own_versions(crew, folder, tmp_path):
    def train():
        import time

        import helpers

        nbelastic.report(started=1)
        while not (tmp_path / "go").exists():
            time.sleep(0.02)
        import models.inner

        return helpers.answer().version, models.inner.scale

    edit(folder, 1)
    first = crew.fit(train, np=2, block=False)
    edit(folder, 2)
    (folder / "models" / "base.py").write_text("scale = 1000\n")
    second = crew.fit(train, np=2, block=False)
    (tmp_path / "go").touch()
    assert first.results(60) == [(10, 10)] * 2
    assert second.results(60) == [(2000, 1000)] * 2


def test_a_module_that_did_not_travel_is_named_with_the_reason(crew, folder):
    (folder / "private.py").write_text("key = 1")
    (folder / ".gitignore").write_text("private.py\n")

    def train():
        import private

        return private.key

    with pytest.raises(RankFailed, match=r"private did not travel.*gitignore") as caught:
        crew.fit(train, np=2)
    assert isinstance(caught.value, ModuleNotFoundError)

    def seek():
        import importlib

        return importlib.import_module("models.inner").scale

    with pytest.raises(RankFailed, match="write `import models` into the function"):
        crew.fit(seek, np=2)
