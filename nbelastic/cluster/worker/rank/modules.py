"""Import a job's own modules in a rank.

``import`` finds the job's own modules before anything on the worker's path.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from nbelastic.cluster.payload import Modules, Source


def install(modules: Modules) -> None:
    """Make imports find a job's modules from now on.

    What is imported already stays: it is what every rank needs, and none of it is the user's, even
    if it lies in a folder of ``PYTHONPATH``.
    """
    if modules.sources:
        sys.meta_path.insert(0, _SourceFinder(modules.sources))
        importlib.invalidate_caches()


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
