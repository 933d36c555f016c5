"""Command of a script, and the script's folder, packed for workers elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import re
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbelastic.cluster import GitIgnore
from nbelastic.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?(\.exe)?", re.IGNORECASE)
_HARMLESS = {"-u", "-B", "-s", "-E", "-I"}
"""Options of Python that do not change what a script does in a rank."""


@dataclass(frozen=True)
class ScriptCommand:
    """A script to run, as ``python`` would."""

    script: str  # absolute path; empty where a module is run
    module: str  # as for ``python -m``; empty for a script
    arguments: tuple[str, ...]
    folder: str  # absolute; goes first on ``sys.path``

    @property
    def name(self) -> str:
        """The script's name for people."""
        return os.path.basename(self.script) or self.module

    @property
    def file(self) -> str:
        """The file to run, as far as known without an import."""
        if self.script:
            return self.script
        base = os.path.join(self.folder, *self.module.split("."))
        return f"{base}.py" if os.path.isfile(f"{base}.py") else os.path.join(base, "__main__.py")


def script_command(words: Sequence[str], cwd: str) -> ScriptCommand:
    """Return what a command runs; relative paths start from `cwd`.

    It is ``python train.py --epochs 3``, ``python -m package.train``, or ``train.py``.
    """
    if not words:
        raise OptionError("a command is missing: dask elastic run [OPTIONS] python train.py …")
    rest = list(words)
    if _PYTHON.fullmatch(os.path.basename(rest[0])):
        del rest[0]
        while rest and rest[0] in _HARMLESS:
            del rest[0]
        if rest and rest[0] == "-m":
            module = rest[1] if len(rest) > 1 else ""
            if not all(part.isidentifier() for part in module.split(".")):
                raise OptionError(
                    "python -m: the name of a module must follow, as in -m package.train"
                )
            return ScriptCommand("", module, tuple(rest[2:]), os.path.abspath(cwd))
    if not rest:
        raise OptionError(f"{' '.join(words)!r}: a script is missing after it")
    if rest[0].startswith("-"):
        raise OptionError(
            f"{rest[0]!r}: this option of Python cannot be used in a rank; ranks run "
            "'python SCRIPT …' and 'python -m MODULE …'"
        )
    script = os.path.normpath(os.path.join(cwd, os.path.expanduser(rest[0])))
    if not os.path.isfile(script):
        raise OptionError(f"{rest[0]!r}: there is no such script in {cwd}")
    if not os.access(script, os.R_OK):
        raise OptionError(f"{rest[0]!r}: the script cannot be read: permission denied")
    while os.path.islink(script):  # as Python does: sys.path begins with its real folder
        script = os.path.normpath(os.path.join(os.path.dirname(script), os.readlink(script)))
    if not script.endswith((".py", ".pyw")) and not _is_python(script):
        raise OptionError(
            f"{rest[0]!r}: must be a Python script; a rank loads it, and runs no other command"
        )
    return ScriptCommand(script, "", tuple(rest[1:]), os.path.dirname(script))


def _is_python(script: str) -> bool:
    """Return whether a file without ``.py`` begins as a Python script does."""
    with open(script, "rb") as file:
        first = file.readline(200)
    return first.startswith(b"#!") and b"python" in first


MOST_BYTES = 10 * 2**20
"""Most bytes of files that travel with a job, before they are packed."""

MOST_FILES = 5000
"""Most files that travel with a job."""

_NEVER = {"__pycache__", ".git", ".hg", ".svn", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
"""Directories without anything that a script needs."""


@dataclass(frozen=True)
class Bundle:
    """A folder as it travels."""

    packed: bytes  # a ZIP file
    files: int
    size: int  # bytes before they were packed
    ignored: tuple[str, ...]  # what ``.gitignore`` files exclude, relative to the folder

    def describe(self, folder: str) -> str:
        """Return a line on the files sent with the job, and on the ignored files."""
        noun = "file" if self.files == 1 else "files"
        words = f"sent with the job: {self.files} {noun} of {folder}, {self.size / 1024:,.1f} KiB"
        if not self.ignored:
            return words
        more = len(self.ignored) - 3
        names = ", ".join(self.ignored[:3]) + (f" and {more} more" if more > 0 else "")
        return f"{words}; a .gitignore excludes {names}"


def bundle_of(folder: str, script: str = "") -> Bundle:
    """Pack a folder, without what its ``.gitignore`` files exclude; the script is never left out.

    Too many bytes or files are an OptionError that names the largest parts; so is a file that
    cannot be read, or that has a name which a ZIP file cannot have.
    """
    ignore = GitIgnore(folder)
    ignored: list[str] = []
    found: dict[str, int] = {}
    for directory, names, files in os.walk(folder):
        names[:] = sorted(_kept(directory, names, folder, ignore, ignored))
        for name in sorted(files):
            path = os.path.join(directory, name)
            if path != script and ignore.excludes(path, directory=False):
                ignored.append(os.path.relpath(path, folder))
            elif os.path.isfile(path) and not name.endswith((".pyc", ".pyo")):
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    found[path] = os.path.getsize(path)
        if sum(found.values()) > 100 * MOST_BYTES or len(found) > 10 * MOST_FILES:
            break  # far too much already; the rest is not looked at
    size = sum(found.values())
    if size > MOST_BYTES or len(found) > MOST_FILES:
        raise OptionError(_too_much(folder, found, size))
    packed, number = _zip(found, folder)
    return Bundle(packed, number, size, tuple(ignored))


def _kept(
    directory: str, names: list[str], folder: str, ignore: GitIgnore, ignored: list[str]
) -> list[str]:
    kept = []
    for name in names:
        path = os.path.join(directory, name)
        if name in _NEVER or os.path.exists(os.path.join(path, "pyvenv.cfg")):
            continue
        if ignore.excludes(path, directory=True):
            ignored.append(os.path.relpath(path, folder) + "/")
        else:
            kept.append(name)
    return kept


def _zip(found: dict[str, int], folder: str) -> tuple[bytes, int]:
    """Return a ZIP of the files that still exist, and their number."""
    buffer = io.BytesIO()
    files = 0
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as file:
        for path in found:
            name = os.path.relpath(path, folder)
            try:
                file.write(path, name)
                files += 1
            except FileNotFoundError:
                continue
            except UnicodeEncodeError:
                raise OptionError(_cannot_travel(name, "its name is not UTF-8")) from None
            except OSError as error:
                raise OptionError(_cannot_travel(name, error.strerror or str(error))) from None
    return buffer.getvalue(), files


def _cannot_travel(name: str, problem: str) -> str:
    shown = name.encode("utf-8", "backslashreplace").decode()
    return (
        f"the file {shown}: {problem}, so it cannot travel with the job; name it in a "
        ".gitignore if ranks do not need it, or use --shared-fs where all hosts see it"
    )


def _too_much(folder: str, found: dict[str, int], size: int) -> str:
    parts: dict[str, int] = {}
    for path, each in found.items():
        top = os.path.relpath(path, folder).split(os.sep, 1)[0]
        parts[top] = parts.get(top, 0) + each
    largest = sorted(parts, key=lambda top: -parts[top])[:3]
    named = ", ".join(f"{top} ({parts[top] / 2**20:,.1f} MiB)" for top in largest)
    return (
        f"{folder} has {len(found):,} files of {size / 2**20:,.1f} MiB, and at most "
        f"{MOST_FILES:,} of {MOST_BYTES >> 20} MiB travel with a job; largest: {named}. "
        "Name what ranks do not need in a .gitignore, or use --shared-fs where all hosts see it"
    )
