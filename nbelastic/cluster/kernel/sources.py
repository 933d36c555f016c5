"""Find the user's own modules that a function needs, with their sources.

Cloudpickle writes their classes and functions by reference, which workers elsewhere cannot import.
Found are the modules of pickled classes and functions, those that pickled code imports, also in
function bodies, and those that these modules import in turn. A package travels as a whole.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from pathspec import GitIgnoreSpec

from nbelastic.cluster.payload import Modules, Source
from nbelastic.pickling import Pickler

MOST_BYTES = 16 * 2**20  # most bytes of source that travel with a job
MOST_FILES = 5000  # most files of a package; one with more is data, or an environment
MOST_ENTRIES = 1000  # most entries of a directory without ``__init__.py``; one with more holds data

_COMPILED = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_IMPORT = re.compile(
    r"(?:^|[;:])[ \t]*(?:from[ \t]+([A-Za-z_]\w*)[\w.]*[ \t]+import\b|import[ \t]+([^#;\n]+))",
    re.MULTILINE,
)
_NOT_USERS = frozenset(sys.stdlib_module_names) | {"__main__", "__mp_main__", "nbelastic"}


class _Noting(Pickler):
    """A pickler that notes the modules imported by a reader of its output."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.names: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):  # code within it comes by itself
            steps = dis.get_instructions(obj)
            self.names |= {str(each.argval) for each in steps if each.opname == "IMPORT_NAME"}
        elif isinstance(obj, (type, FunctionType)) and _is_importable(obj):
            self.names.add(obj.__module__)
        elif isinstance(obj, ModuleType):
            self.names.add(str(obj.__name__))
        return super().reducer_override(obj)


def dumps_noting(value: object) -> tuple[bytes, set[str]]:
    """Pickle a value; return the pickle and the names of referenced modules."""
    file = io.BytesIO()
    pickler = _Noting(file)
    pickler.dump(value)
    return file.getvalue(), pickler.names


def _is_importable(obj: Any) -> bool:
    """Return whether a class or function is pickled by reference."""
    found: Any = sys.modules.get(str(obj.__module__))
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


@functools.lru_cache(maxsize=10_000)
def _imported_by_text(text: bytes) -> frozenset[str]:
    """Return top-level names that a source may import; some more do no harm."""
    found: set[str] = set()
    for origin, names in _IMPORT.findall(text.decode("utf-8", "replace")):
        found.add(origin)
        found |= {name.strip().partition(".")[0].partition(" ")[0] for name in names.split(",")}
    return frozenset(name for name in found if name.isidentifier())


# -- collecting --------------------------------------------------------------------------------


def collect(names: Iterable[str]) -> Modules:
    """Return the user's own, not installed, among some modules and among what they import."""
    importlib.invalidate_caches()
    sources: dict[str, Source] = {}
    left_out: dict[str, str] = {}
    waiting = {name.partition(".")[0] for name in names}
    seen: set[str] = set()
    room = MOST_BYTES
    while waiting - seen:
        name = min(waiting - seen)
        seen.add(name)
        found, ignored, compiled = _read(name, _places(name))
        size = sum(len(source.text or b"") for source in found.values())
        too_many = len(found) > MOST_FILES
        if compiled:
            left_out[name] = f"it has compiled parts ({compiled})"
        elif too_many or size > room:
            much = f"more than {MOST_FILES} files" if too_many else f"{size / 2**20:.0f} MiB"
            left_out[name] = f"it has {much}, and at most {MOST_BYTES >> 20} MiB travel with a job"
        else:
            room -= size
            left_out.update(dict.fromkeys(ignored, "a .gitignore excludes it"))
            sources.update(found)
            waiting.update(*(_imported_by_text(each.text or b"") for each in found.values()))
    return Modules(sources, left_out)


def _read(name: str, places: list[str]) -> tuple[dict[str, Source], list[str], str]:
    """Return a module's sources by full name, excluded names, and a compiled file, if any."""
    sources: dict[str, Source] = {}
    folders: dict[str, str] = {}
    ignored: list[str] = []
    for place in places:
        git, skipped, tree = GitIgnore(os.path.dirname(place)), list[str](), os.path.isdir(place)
        if git.excludes(place, directory=tree):
            ignored.append(name)
            continue
        alone = [(os.path.dirname(place), list[str](), [os.path.basename(place)])]
        for folder, names, files in walk(place, git, skipped) if tree else alone:
            if "__init__.py" not in files and len(names) + len(files) > MOST_ENTRIES:
                names.clear()  # a directory of data
                continue
            folders[_module_of(name, place, folder)] = folder
            names[:] = filter(str.isidentifier, names)
            for path in [os.path.join(folder, file) for file in files]:
                if (module := _module_of(name, place, path)) and path.endswith(_COMPILED):
                    return sources, ignored, path
                if module:
                    with contextlib.suppress(OSError):  # not readable: an import says so
                        sources[module] = Source(path, Path(path).read_bytes())
            if len(sources) > MOST_FILES:
                break
        ignored += filter(None, [_module_of(name, place, path) for path in skipped])
    parts = [each.split(".") for each in sources]
    packages = {".".join(each[:end]) for each in parts for end in range(1, len(each))}
    for package in packages & folders.keys() - sources.keys():
        sources[package] = Source(folders[package], None)
    return sources, ignored, ""


def _module_of(package: str, top: str, path: str) -> str:
    """Return the full name of a module or directory of a package; empty for any other file."""
    parts = [] if path == top else os.path.relpath(path, top).split(os.sep)
    if parts and parts[-1].endswith((".py", *_COMPILED)):
        stem, _, rest = parts.pop().partition(".")
        if not path.endswith(_COMPILED) and rest != "py":
            return ""
        parts += [] if stem == "__init__" else [stem]
    return ".".join([package, *parts]) if all(map(str.isidentifier, parts)) else ""


# -- whose a module is -------------------------------------------------------------------------


def _places(name: str) -> list[str]:
    """Return the file of a module of the user's own, or its directories if it is a package."""
    if name in _NOT_USERS or not name.isidentifier():
        return []
    paths = [os.path.abspath(path) for path in _paths_of(name)]
    return [path for path in paths if not _is_installed(Path(path), name)]


def _paths_of(name: str) -> list[str]:
    specs = [getattr(sys.modules.get(name), "__spec__", None), _find(name)]
    for spec in filter(None, specs):
        folders = spec.submodule_search_locations
        paths = [spec.origin or ""] if folders is None else folders
        if found := [path for path in paths if os.path.exists(path)]:
            return found
    return []


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.machinery.PathFinder.find_spec(name)
    except (ImportError, ValueError, OSError):
        return None


def _is_installed(path: Path, name: str) -> bool:
    real, libraries = Path(os.path.realpath(path)), _library(os.getcwd())
    finders = [each for key, each in list(sys.modules.items()) if key.startswith("__editable__")]
    return (
        bool({"site-packages", "dist-packages"} & {*path.parts, *real.parts})
        or any(real.is_relative_to(each) or path.is_relative_to(each) for each in libraries)
        or str(path.parent) in _editable_folders()
        or any(name in getattr(each, "MAPPING", ()) for each in finders)  # setuptools' way
        or _is_editable(name)
    )


@functools.cache
def _library(here: str) -> list[str]:
    """Return the directories of Python itself, and of its environment if we are not inside."""
    paths = {os.path.realpath(sysconfig.get_path(each)) for each in ("stdlib", "platstdlib")}
    for prefix in {os.path.realpath(each) for each in (sys.prefix, sys.base_prefix)}:
        if not Path(here).is_relative_to(prefix):
            paths.add(prefix)
    return sorted(paths)


@functools.cache
def _editable_folders() -> set[str]:
    """Return the directories that ``.pth`` files have put on the path when Python started."""
    found: set[str] = set()
    for directory in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for file in Path(directory).glob("*.pth"):
            with contextlib.suppress(OSError):
                lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
                found |= {os.path.abspath(os.path.join(directory, line.strip())) for line in lines}
    return found


def _is_editable(name: str) -> bool:
    """Return whether the distribution of the module's name is installed from its own folder."""
    try:
        text = importlib.metadata.distribution(name).read_text("direct_url.json")
        return bool(json.loads(text or "{}").get("dir_info", {}).get("editable"))
    except (importlib.metadata.PackageNotFoundError, ValueError, OSError):
        return False


_NEVER = {"__pycache__", ".git", ".hg", ".svn", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


def walk(
    top: str, git: GitIgnore, ignored: list[str]
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a folder as ``os.walk`` does, sorted; add to `ignored` what git leaves out."""
    for folder, names, files in os.walk(top):
        names[:] = [
            name
            for name in set(names) - _NEVER
            if not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
        ]
        for found in (names, files):
            paths = {os.path.join(folder, name): name for name in sorted(found)}
            out = [path for path in paths if git.excludes(path, directory=found is names)]
            ignored += out
            found[:] = [name for path, name in paths.items() if path not in out]
        yield folder, names, files


class GitIgnore:
    """The ``.gitignore`` files above and below a directory; each is read once.

    Files above the directory, an absolute path, count if they belong to the same git repository,
    and if they do not exclude the directory itself.
    """

    def __init__(self, top: str) -> None:
        above = (Path(top), *Path(top).parents)
        self._base = next((str(each) for each in above if (each / ".git").exists()), top)
        self._specs: dict[str, GitIgnoreSpec] = {}
        if self.excludes(top, directory=True):  # a home directory under git that names its files
            self._base = top

    def excludes(self, path: str, *, directory: bool) -> bool:
        """Return whether git would leave out a file or directory below the top."""
        folder, found = path, None
        while found is None and folder != self._base:  # the nearest file overrides files above
            folder = os.path.dirname(folder)
            name = os.path.relpath(path, folder) + "/" * directory
            found = self._spec(folder).check_file(name).include
        return bool(found)

    def _spec(self, folder: str) -> GitIgnoreSpec:
        if folder not in self._specs:
            patterns: list[Any] = []
            with (
                contextlib.suppress(OSError),
                open(f"{folder}/.gitignore", encoding="utf-8", errors="replace") as file,
            ):
                for line in file:
                    with contextlib.suppress(ValueError):  # a lone "!": git passes it over, too
                        patterns += GitIgnoreSpec.from_lines([line]).patterns
            self._specs[folder] = GitIgnoreSpec(patterns)
        return self._specs[folder]
