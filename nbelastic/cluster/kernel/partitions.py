"""Compute and hold the partitions of Dask collections that a job reads."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dask.base import is_dask_collection
from dask.sizeof import sizeof
from distributed import Client, Future, futures_of

from .preflight import parts_of


class HeldPartitions:
    """Partitions held by this kernel, until the scheduler holds them."""

    def __init__(self) -> None:
        self._futures: list[Future[Any]] = []
        self.keys: tuple[str, ...] = ()
        """The keys of the partitions, as JSON."""

    def hold(self, client: Client, sources: Sequence[Any]) -> None:
        """Compute the partitions of sources, and give the sources their keys and sizes."""
        keys: list[str] = []
        for source in sources:
            computed = [futures_of(client.persist(each)) for each in source.collections]
            self._futures += itertools.chain(*computed)
            # A persisted dataframe may have other keys than its futures, whose last parts are
            # places.
            columns = [sorted(futures, key=lambda future: future.key[1:]) for futures in computed]
            parts = list(zip(*columns, strict=True))
            sizes = client.map(_measure, list(itertools.chain(*parts)), pure=False)
            self._futures += sizes
            found = client.gather(sizes)
            counts = iter([count for count, _ in found])
            rows = [tuple(itertools.islice(counts, len(part))) for part in parts]
            texts = [tuple(json.dumps(future.key) for future in part) for part in parts]
            source.hold(texts, rows, sum(size for _, size in found))
            keys += itertools.chain(*texts)
        self.keys = tuple(dict.fromkeys(keys))

    def release(self) -> None:
        """Release all by hand: an error's traceback, which notebooks keep, refers to futures."""
        for future in self._futures:
            future.release()
        self._futures.clear()


def with_sources(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """Return arguments with sources in place of collections, and all sources of the function."""
    args = tuple(map(_source_of, args))
    kwargs = {name: _source_of(value) for name, value in kwargs.items()}
    module = sys.modules.get("nbelastic.data.sources.partitions")  # which imports torch
    if module is None:
        return args, kwargs, []
    parts = [value for _, value in parts_of(function, args, kwargs)]
    found = {id(value): value for value in parts if isinstance(value, module.Dask)}
    return args, kwargs, list(found.values())


def _source_of(value: Any) -> Any:
    several = isinstance(value, (tuple, list)) and len(value) > 0
    if not all(map(_has_rows, value)) if several else not _has_rows(value):
        return value
    from nbelastic.data.sources.partitions import Dask

    return Dask(tuple(value) if several else value)


def _has_rows(value: Any) -> bool:
    """Return whether a value is a dataframe, a series or an array of Dask's."""
    if not is_dask_collection(value) or not isinstance(getattr(value, "npartitions", None), int):
        return False  # a Delayed has any attribute, of its own type
    return hasattr(value, "chunks") or hasattr(value, "_meta")


def _measure(part: Any) -> tuple[int, int]:
    """Return the rows and the bytes of a partition."""
    return len(part), int(sizeof(part))
