"""Import a job's own modules in a worker, and wait for imports of other threads.

Runs in a worker, in the threads of ranks. While a rank runs, ``import`` finds the job's own modules
before anything on the worker's path, and modules that the worker had imported under these names are
put away. Afterwards they are back. The modules of the last job are kept: the next one with equal
sources has them as they are.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
import threading
from typing import TYPE_CHECKING, Any

from nbelastic.cluster.payload import process_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

    from nbelastic.cluster.payload import Modules, Source

__all__ = ["imported", "installed"]

_lock = threading.Lock()


def imported(name: str) -> Any:
    """Return a module that this process has imported, else None; wait for an import under way.

    Ranks may run as threads of one process. While the first imports torch, which takes seconds,
    ``sys.modules`` has it without most of its attributes.
    """
    if name not in sys.modules:
        return None
    try:
        return importlib.import_module(name)
    except Exception:  # whatever its import has raised in the other thread
        return None


class _State:
    """What this process has installed; under the lock."""

    ranks = 0
    digest = ""
    finder: _SourceFinder | None = None
    away: Mapping[str, ModuleType] = {}
    kept: tuple[str, Mapping[str, ModuleType]] = ("", {})


@contextlib.contextmanager
def installed(modules: Modules) -> Iterator[None]:
    """Have imports find a job's modules, for the length of a block.

    Raises
    ------
    ImportError
        Another rank in this process has other versions of its own modules.
    """
    if not modules.stale or modules.process == process_name():
        yield  # nothing to do; or the kernel itself, which has them imported
        return
    with _lock:
        if _State.ranks and _State.digest != modules.digest:
            raise ImportError(
                "another job runs in this process with other modules of the notebook's folder; "
                "let it end first, or use workers that are processes of their own"
            )
        if not _State.ranks:
            _put_in(modules)
        _State.ranks += 1
    try:
        yield
    finally:
        with _lock:
            _State.ranks -= 1
            if not _State.ranks:
                _take_out(modules)


def _put_in(modules: Modules) -> None:
    _State.digest = modules.digest
    _State.away = _take(modules.stale)
    digest, kept = _State.kept
    if digest == modules.digest:
        sys.modules.update(kept)
    _State.finder = _SourceFinder(modules.sources)
    sys.meta_path.insert(0, _State.finder)
    importlib.invalidate_caches()


def _take_out(modules: Modules) -> None:
    with contextlib.suppress(ValueError):
        sys.meta_path.remove(_State.finder)  # type: ignore[arg-type]
    mine = _take(modules.stale)
    for source in modules.sources.values():
        linecache.cache.pop(source.path, None)
    shipped = {name.partition(".")[0] for name in modules.sources}
    kept = {name: module for name, module in mine.items() if name.partition(".")[0] in shipped}
    _State.kept = modules.digest, kept
    sys.modules.update(_State.away)
    _State.away, _State.finder = {}, None


def _take(tops: frozenset[str]) -> dict[str, ModuleType]:
    """Take modules and all within them from the interpreter."""
    names = [name for name in list(sys.modules) if name.partition(".")[0] in tops]
    return {name: sys.modules.pop(name) for name in names}


class _SourceFinder(importlib.abc.MetaPathFinder):
    """Finds modules among a job's."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        source = self._sources.get(fullname)
        if source is None:
            return None
        if source.text is None:
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [source.path]
            return spec
        return importlib.util.spec_from_loader(fullname, _Loader(source), is_package=source.package)


class _Loader(importlib.abc.ExecutionLoader):
    """Loads a module from its text; files and lines in tracebacks are those of the kernel."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def is_package(self, fullname: str) -> bool:
        return self._source.package

    def get_filename(self, fullname: str) -> str:
        return self._source.path

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._source.text or b"")

    def get_code(self, fullname: str) -> Any:
        # Tracebacks show these lines, also where the file has been edited since.
        text = self.get_source(fullname)
        lines = text.splitlines(keepends=True)
        linecache.cache[self._source.path] = (len(text), None, lines, self._source.path)
        return self.source_to_code(self._source.text or b"", self._source.path)
