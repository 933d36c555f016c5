"""Pack the folder of a script, to be unpacked on workers that do not see it."""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from dataclasses import dataclass

from nbelastic.cluster import GitIgnore
from nbelastic.errors import OptionError

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
        """Return a line on what travels, and what does not."""
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
    """Return a ZIP file and the number of files in it: those that are still there."""
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
