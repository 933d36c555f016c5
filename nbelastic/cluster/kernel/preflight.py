"""Check versions, pack the function, and hold the partitions of a job."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import logging
import pickle
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dask.base import is_dask_collection
from dask.sizeof import sizeof
from distributed import Client, Future, futures_of

from nbelastic.cluster.dask_compat import after_shielding
from nbelastic.cluster.payload import Modules, keras_settings, torch_settings
from nbelastic.cluster.wire import MUST_MATCH, versions, versions_reader
from nbelastic.errors import NotPicklable, VersionMismatch
from nbelastic.messages import JobPayload
from nbelastic.pickling import dumps, failing_part

from .sources import collect, dumps_noting

logger = logging.getLogger(__name__)

SECRET_BYTES = 32

LARGE = 64 * 2**20  # bytes of a function, from which on a warning says so
ANSWER_TIMEOUT = 5.0  # seconds that a worker has to answer with its versions
MOST_ELEMENTS = 10_000  # elements of a collection that are searched for a future


def check_versions(client: Client) -> None:
    """Compare the versions of kernel, scheduler and present workers; VersionMismatch names each."""
    # A job's first call on the workers: from then on they ignore the kernel's interrupts.
    here = versions()
    probe = versions_reader()
    found = {"the scheduler": client.run_on_scheduler(probe)}
    addresses = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.workers))
    found |= client.sync(_ask_workers, client, after_shielding(probe), addresses)
    problems = []
    for where, there in found.items():
        names = ("python", "nbelastic") if where == "the scheduler" else MUST_MATCH
        if isinstance(there, BaseException):
            problems.append(f"{where} could not be asked: {there!r}")
            continue
        for name in names:
            if there.get(name) != here[name]:
                problems.append(f"{where} has {name} {there.get(name)}, the kernel {here[name]}")
    if problems:
        raise VersionMismatch(
            "kernel and cluster differ:\n  "
            + "\n  ".join(problems)
            + "\ninstall the same versions on all of them (the kernel has "
            + ", ".join(f"{name} {here[name]}" for name in MUST_MATCH)
            + ")"
        )


async def _ask_workers(
    client: Client, probe: Callable[[], dict[str, str]], addresses: list[str]
) -> dict[str, Any]:
    """Run `probe` on all workers; one without an answer in time, or about to die, is left out."""
    found: dict[str, Any] = {}  # the others are refused when they send their versions

    async def ask(address: str) -> None:
        call = client._run(probe, workers=[address], on_error="return")
        with contextlib.suppress(asyncio.TimeoutError):
            found.update(await asyncio.wait_for(call, ANSWER_TIMEOUT))

    await asyncio.gather(*map(ask, addresses))
    return {where: each for where, each in found.items() if not isinstance(each, OSError)}


def pack_function(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[JobPayload, Modules]:
    """Pickle a function and its modules; NotPicklable names the value that cannot travel."""
    parts = list(parts_of(function, args, kwargs))
    for name, value in parts:
        if _has_future(value):  # it pickles, but a rank would get one that does not serve
            raise NotPicklable(
                f"{name} is or has a Dask Future, which has no value in a rank. Pass "
                "future.result(), or have the function load or compute the data itself"
            )
    try:
        call, names = dumps_noting((function, args, kwargs))
    except Exception as error:  # pickling runs code of any class
        culprit = _culprit(function, parts)
        raise NotPicklable(
            f"{culprit} cannot be sent to the workers: {error}. "
            "Make it inside the function instead, or pass what it is made from."
        ) from error
    modules = collect(names | getattr(function, "imported", set()))
    sources = pickle.dumps(modules)
    if len(call) + len(sources) > LARGE:
        logger.warning(
            "the function takes %.0f MiB to each worker; load large data on the workers, and "
            "clone() tensors that are views of a larger one, which goes with them",
            (len(call) + len(sources)) / 2**20,
        )
    settings = {**torch_settings(), **keras_settings()}
    return JobPayload(secrets.token_bytes(SECRET_BYTES), sources, call, settings), modules


def parts_of(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield each value that travels, with its name in the user's code."""
    for index, value in enumerate(args):
        yield f"args[{index}]", value
    for name, value in kwargs.items():
        yield f"the argument {name!r}", value
    for name, value in getattr(function, "captured", {}).items():
        yield f"the variable {name!r}", value
    inner = inspect.unwrap(function)
    if inspect.isfunction(inner):
        with contextlib.suppress(ValueError):  # an outer variable has no value yet
            captured = inspect.getclosurevars(inner)
            for name, value in {**captured.globals, **captured.nonlocals}.items():
                yield f"the variable {name!r} that {inner.__name__}() uses", value
        names, defaults = inspect.signature(inner).parameters, inner.__defaults__ or ()
        for name, value in zip(names, defaults, strict=False):
            yield f"the default of {name!r}", value


def _has_future(value: Any, depth: int = 4) -> bool:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, set, frozenset)):
        return isinstance(value, Future)
    inner = itertools.islice(value, MOST_ELEMENTS)
    return depth > 0 and any(_has_future(each, depth - 1) for each in inner)


def _culprit(function: Callable[..., Any], parts: list[tuple[str, Any]]) -> str:
    for name, value in parts:
        try:
            dumps(value)
        except Exception:  # pickling runs code of any class
            where, part = failing_part(value, dumps, _variables_of)
            there = f"; there {where.removeprefix(', ')} is a {type(part).__name__}"
            return f"{name} (a {type(value).__name__}{there if where else ''})"
    return f"the function {getattr(function, '__name__', function)!r}"


def _variables_of(value: Any) -> list[tuple[str, Any]]:
    parts = parts_of(value, (), {}) if inspect.isfunction(value) else ()
    return [(f", {name}", part) for name, part in parts]


# -- partitions of Dask collections ---------------------------------------------------------------


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
    parts = value if several else (value,)
    if not all(map(is_dask_collection, parts)):
        return value
    from nbelastic.data.sources.partitions import Dask, is_rows

    if not all(map(is_rows, parts)):
        return value
    return Dask(tuple(value) if several else value)


def _measure(part: Any) -> tuple[int, int]:
    """Return the rows and the bytes of a partition."""
    return len(part), int(sizeof(part))
