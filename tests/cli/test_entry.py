"""The entry module: a part of every ``dask`` call, so it imports click alone."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from nbelastic.cli.entry import COMMANDS, elastic

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def python(code: str) -> str:
    words = [sys.executable, "-c", code]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_the_entry_module_imports_click_alone():
    code = (
        "import sys, click; before = set(sys.modules); import nbelastic.cli.entry; "
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}"
        " - set(sys.stdlib_module_names)))"
    )
    assert python(code).split() == ["nbelastic"]


def test_every_entry_point_exists():
    groups = [*PROJECT["entry-points"].values(), PROJECT["scripts"]]
    for target in (target for group in groups for target in group.values()):
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), target


@pytest.mark.slow
def test_dask_has_the_commands():
    code = (
        "import sys; sys.argv = ['dask', 'elastic', '--help']; import dask.cli; dask.cli.run_cli()"
    )
    text = python(code)
    assert "Usage: dask elastic" in text or "Usage: -c elastic" in text
    assert all(f"  {name}  " in text for name in COMMANDS)


def test_a_command_that_is_nearly_right_is_named():
    result = CliRunner().invoke(elastic, ["rum"])
    assert elastic.get_command(click.Context(elastic), "nonsense") is None
    assert result.exit_code == 2
    assert "there is no command 'rum'; did you mean run?" in result.output
