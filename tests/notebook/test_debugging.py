"""``%debug`` after the error of a rank, and after any other."""

from __future__ import annotations

import sys

import pytest

from nbelastic.notebook import load_ipython_extension, unload_ipython_extension
from tests.notebook.shells import run


@pytest.fixture
def looked(shell, monkeypatch):
    """What IPython's own debugger was asked to look at; it would wait for commands."""
    asked = []

    def look(*_, force=False, **__):
        asked.append(type(sys.last_value).__name__)

    monkeypatch.setattr(type(shell.InteractiveTB), "debugger", look)
    return asked


RAISE = "import nbelastic\nraise nbelastic.errors.RankFailed('rank 0 failed')"


def test_the_error_of_a_rank_cannot_be_looked_into(shell, looked, capsys):
    run(shell, "1 / 0", fails=True)
    run(shell, RAISE, fails=True)
    capsys.readouterr()
    run(shell, "%debug")
    assert "call it in a cell without fit" in capsys.readouterr().out
    assert looked == []


def test_any_other_error_can(shell, looked, capsys):
    run(shell, RAISE, fails=True)
    run(shell, "1 / 0", fails=True)
    run(shell, "%debug")
    assert looked == ["ZeroDivisionError"]
    assert "rank" not in capsys.readouterr().out.splitlines()[-1]


def test_the_magic_is_ipythons_again_without_the_extension(shell):
    wrapped = shell.find_line_magic("debug")
    load_ipython_extension(shell)
    assert shell.find_line_magic("debug") is wrapped
    unload_ipython_extension(shell)
    original = shell.find_line_magic("debug")
    assert original.__func__ is type(original.__self__).debug
    unload_ipython_extension(shell)
    assert shell.find_line_magic("debug") is original
