"""Command of a script, and the script's folder, packed for workers elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import re
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nbelastic.cluster import GitIgnore, walk
from nbelastic.errors import OptionError

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?(\.exe)?", re.IGNORECASE)
_HARMLESS = {"-u", "-B", "-s", "-E", "-I"}  # do not change what a script does in a rank


@dataclass(frozen=True)
class ScriptCall:
    """A script to run, as ``python`` would; it travels to the ranks."""

    script: str  # absolute path; empty where a module is run
    module: str  # as for ``python -m``; empty for a script
    arguments: tuple[str, ...]
    folder: str  # absolute; goes first on ``sys.path``
    cwd: str  # of the kernel
    mark: tuple[str, int, int] | None = None  # of a file: a worker that has it uses the folder
    packed: bytes | None = None  # the folder as a ZIP file; None where hosts share its file system
    alias: bool | None = None  # None: where Horovod is not installed

    @property
    def file(self) -> str:
        """The file to run, as far as known without an import."""
        if self.script:
            return self.script
        base = os.path.join(self.folder, *self.module.split("."))
        return f"{base}.py" if os.path.isfile(f"{base}.py") else os.path.join(base, "__main__.py")


def mark_of(path: str) -> tuple[str, int, int] | None:
    """Return a file's identity, equal on all hosts that share its file system, or None."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return path, found.st_ino, found.st_mtime_ns


def script_call(words: Sequence[str], cwd: str) -> ScriptCall:
    """Return the call of a command; relative paths start from `cwd`.

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
            return ScriptCall("", module, tuple(rest[2:]), os.path.abspath(cwd), cwd)
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
    return ScriptCall(script, "", tuple(rest[1:]), os.path.dirname(script), cwd)


def _is_python(script: str) -> bool:
    with open(script, "rb") as file:
        first = file.readline(200)
    return first.startswith(b"#!") and b"python" in first


MOST_BYTES = 10 * 2**20  # most bytes of files that travel with a job, before they are packed
MOST_FILES = 5000  # most files that travel with a job


def bundle_of(folder: str, script: str = "") -> tuple[bytes, str]:
    """Return a folder as a ZIP file, and a line on the files that travel and are left out.

    What its ``.gitignore`` files exclude is left out, but never the script. Too many bytes or files
    are an OptionError that names the largest parts; so is a file that cannot be read, or that has a
    name which a ZIP file cannot have.
    """
    ignored: list[str] = []
    found: dict[str, int] = {}
    for directory, _, files in walk(folder, GitIgnore(folder), ignored):
        for path in [os.path.join(directory, name) for name in files]:
            if os.path.isfile(path) and not path.endswith((".pyc", ".pyo")):
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    found[path] = os.path.getsize(path)
        if sum(found.values()) > 100 * MOST_BYTES or len(found) > 10 * MOST_FILES:
            break  # far too much already; the rest is not looked at
    if script in ignored:
        ignored.remove(script)
        found[script] = os.path.getsize(script)
    size = sum(found.values())
    if size > MOST_BYTES or len(found) > MOST_FILES:
        raise OptionError(_too_much(folder, found, size))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path in found:
            name = os.path.relpath(path, folder)
            try:
                archive.write(path, name)
            except (UnicodeEncodeError, OSError) as error:  # such as a name that is not UTF-8
                raise OptionError(
                    f"the file {name!r} cannot travel with the job: {error}; name it in a "
                    ".gitignore if ranks do not need it, or use --shared-fs where all hosts see it"
                ) from None
    number = len(archive.namelist())
    noun = "file" if number == 1 else "files"
    words = f"sent with the job: {number} {noun} of {folder}, {size / 1024:,.1f} KiB"
    if ignored:
        names = [os.path.relpath(path, folder) + "/" * os.path.isdir(path) for path in ignored[:3]]
        more = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
        words += f"; a .gitignore excludes {', '.join(names)}{more}"
    return buffer.getvalue(), words


def _too_much(folder: str, found: dict[str, int], size: int) -> str:
    parts = Counter[str]()
    for path, each in found.items():
        parts[os.path.relpath(path, folder).split(os.sep, 1)[0]] += each
    named = ", ".join(f"{top} ({each / 2**20:,.1f} MiB)" for top, each in parts.most_common(3))
    return (
        f"{folder} has {len(found):,} files of {size / 2**20:,.1f} MiB, and at most "
        f"{MOST_FILES:,} of {MOST_BYTES >> 20} MiB travel with a job; largest: {named}. "
        "Name what ranks do not need in a .gitignore, or use --shared-fs where all hosts see it"
    )
