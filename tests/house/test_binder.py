"""The folder that Binder builds from: what can be known of it without a container."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

ROOT = Path(__file__).parents[2]
BINDER = ROOT / "binder"


def environment() -> dict[str, list[str]]:
    found: dict[str, list[str]] = yaml.safe_load((BINDER / "environment.yml").read_text())
    return found


def test_the_environment_is_conda_forge_alone_with_one_python_and_all_dependencies():
    assert environment()["channels"] == ["conda-forge", "nodefaults"]
    entries = environment()["dependencies"]
    assert all(isinstance(entry, str) for entry in entries), "no pip section"
    (python,) = [entry for entry in entries if re.match(r"python\b", entry)]
    assert re.fullmatch(r"python=3\.\d+", python)
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())
    optional = ours["project"]["optional-dependencies"]["notebook"]
    needed = [*ours["project"]["dependencies"], *optional, *ours["build-system"]["requires"]]
    names = {Requirement(requirement).name for requirement in needed}
    names = names - {"torch"} | {"pytorch-cpu", "pip"}  # conda-forge's name for it
    assert names <= {re.split(r"[<>=! ]", entry)[0] for entry in entries}


LINK = """
import sys
from distributed.utils import format_dashboard_link
print(format_dashboard_link('127.0.0.1', 8787), sys.argv)
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["/user/someone-x1y2", ""])
def test_start_runs_its_command_and_dashboards_go_through_the_proxy(prefix: str):
    """As Binder runs a command, at this place in the hub."""
    assert (BINDER / "start").read_text().splitlines()[-1] == 'exec "$@"'
    known = {k: v for k, v in os.environ.items() if not k.startswith(("DASK_", "JUPYTERHUB"))}
    if prefix:
        known["JUPYTERHUB_SERVICE_PREFIX"] = f"{prefix}/"
    command = [BINDER / "start", sys.executable, "-c", LINK, "two words"]
    ran = subprocess.run(command, env=known, capture_output=True, text=True, check=False)
    assert ran.stdout == f"{prefix}/proxy/8787/status ['-c', 'two words']\n", ran.stderr
    assert ran.returncode == 7
