"""The folder that Binder builds from: what can be known of it without a container."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

ROOT = Path(__file__).parents[2]
BINDER = ROOT / "binder"
SCRIPTS = ("postBuild", "start")


def conda_packages() -> set[str]:
    """Return the names of the packages that environment.yml asks for."""
    environment = yaml.safe_load((BINDER / "environment.yml").read_text())
    return {re.split(r"[<>=! ]", entry)[0] for entry in environment["dependencies"]}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def names(requirements: list[str]) -> set[str]:
    return {Requirement(requirement).name for requirement in requirements}


def start(prefix: str | None, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as Binder would, at this place in the hub."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("DASK_", "JUPYTERHUB"))}
    if prefix is not None:
        environment["JUPYTERHUB_SERVICE_PREFIX"] = prefix
    return subprocess.run(
        [BINDER / "start", *command], env=environment, capture_output=True, text=True, check=False
    )


def test_the_environment_is_conda_forge_alone_with_one_python():
    environment = yaml.safe_load((BINDER / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    assert all(isinstance(entry, str) for entry in environment["dependencies"]), "no pip section"
    (python,) = [entry for entry in environment["dependencies"] if re.match(r"python\b", entry)]
    assert re.fullmatch(r"python=3\.\d+", python)


def test_the_environment_has_all_dependencies_of_the_package():
    declared = project()["project"]
    needed = names(declared["dependencies"]) | names(declared["optional-dependencies"]["notebook"])
    needed |= names(project()["build-system"]["requires"])
    needed = needed - {"torch"} | {"pytorch-cpu", "pip"}  # conda-forge's name for it
    assert needed <= conda_packages()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_strict_executable_bash(name: str):
    script = BINDER / name
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    assert script.stat().st_mode & stat.S_IXUSR
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.slow
def test_start_ends_in_the_command_that_it_is_given():
    assert (BINDER / "start").read_text().splitlines()[-1] == 'exec "$@"'
    ran = start("/", sys.executable, "-c", "import sys; print(sys.argv); sys.exit(7)", "two words")
    assert ran.stdout == "['-c', 'two words']\n"
    assert ran.returncode == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefix", "link"),
    [
        ("/user/someone-x1y2/", "/user/someone-x1y2/proxy/8787/status"),
        ("/", "/proxy/8787/status"),
        (None, "/proxy/8787/status"),
    ],
)
def test_start_sends_dask_dashboards_through_the_proxy(prefix: str | None, link: str):
    code = "from distributed.utils import format_dashboard_link as f; print(f('127.0.0.1', 8787))"
    ran = start(prefix, sys.executable, "-c", code)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == link


@pytest.mark.slow
def test_binder_would_build_from_this_folder():
    expected = ["binder/environment.yml", "binder/postBuild", "binder/start"]
    assert all((ROOT / name).is_file() for name in expected)
    if importlib.util.find_spec("repo2docker") is None:
        return  # what it would make of the folder is known only where it is installed
    command = [sys.executable, "-m", "repo2docker", "--no-build", "--debug"]
    whom = ["--user-id", "1000", "--user-name", "someone"]
    ran = subprocess.run([*command, *whom, ROOT], capture_output=True, text=True, check=False)
    recipe = ran.stdout + ran.stderr
    assert ran.returncode == 0, recipe
    version = re.search(r"python=(\S+)", (BINDER / "environment.yml").read_text())
    assert version is not None
    assert f"Building conda environment for python={version[1]}" in recipe
    assert '--file "binder/environment.yml"' in recipe
    assert "RUN ./binder/postBuild" in recipe
    assert 'ENV R2D_ENTRYPOINT="${REPO_DIR}/binder/start"' in recipe
