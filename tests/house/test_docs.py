"""The documents: they build without a warning, and name only commands that exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from dask.utils import parse_timedelta

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md")]
BASES = (".", "nbelastic", "nbelastic/native", "nbelastic/collectives", "nbelastic/torch")
PAGES += sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    builder = Path(sys.executable).with_name("sphinx-build")
    # All is read and resolved; to write it as HTML, as `make docs` does, takes half as long again.
    command = [builder, "-W", "--keep-going", "-q", "-b", "dummy", "docs", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_links_of_a_page_exist(page):
    text = page.read_text()
    for target in re.findall(r"(?:^|`)make ([a-z-]+)(?=$| *[`#A-Z])", text, re.MULTILINE):
        assert target in targets(), f"make {target}"
    for module in re.findall(r"python -m ((?:benchmarks|tests)[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        there = (page.parent / link).exists()
        assert there or link.startswith("tutorials/"), f"{page.name}: {link}"


def test_files_that_the_documents_name_exist():
    assert len((ROOT / "docs/architecture.md").read_text().splitlines()) <= 350
    text = "\n".join(page.read_text() for page in PAGES)
    names = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|cpp|hpp))`", text))
    missing = [
        name for name in sorted(names) if not any((ROOT / base / name).is_file() for base in BASES)
    ]
    assert not missing


def test_tests_that_show_a_promise_exist():
    text = (ROOT / "docs/reliability.md").read_text()
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    defined = set(re.findall(r"^(?:async )?def (test_\w+)", "\n".join(sources), re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 10
    assert not named - defined


def test_lifetimes_are_such_as_dask_reads():
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    texts = [page.read_text(encoding="utf-8").replace("\\", "") for page in pages]
    found = [each for text in texts for each in re.findall(r'"--lifetime[a-z-]*", "(.*?)"', text)]
    assert len(found) >= 4
    for each in found:
        assert parse_timedelta(each) > 0


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_assertion_of_a_notebook_says_what_it_expects(path: Path) -> None:
    """One that fails tells its reader what was expected."""
    bare = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            lines = ["" if line.startswith("%") else line for line in cell.source.splitlines()]
            for node in ast.walk(ast.parse("\n".join(lines))):
                if isinstance(node, ast.Assert) and not isinstance(
                    node.msg, (ast.Constant, ast.JoinedStr)
                ):
                    bare.append(ast.unparse(node))
    assert not bare, "assertions without words"
