"""Checks before anything is sent: versions on all sides, and whether the function can travel."""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import secrets
from typing import TYPE_CHECKING, Any

import cloudpickle

from nbelastic.errors import NotPicklable, VersionMismatch
from nbelastic.pickling import dumps

from .environment import versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distributed import Client

__all__ = ["LARGE", "check_versions", "pack_function", "unpack_function"]

logger = logging.getLogger(__name__)

LARGE = 64 * 2**20
"""Size of a captured variable, in bytes, from which on a warning names it."""

SECRET_BYTES = 32

ANSWER_TIMEOUT = 5.0
"""Seconds that a worker has to tell what it runs."""

MUST_MATCH = ("python", "nbelastic", "torch")


def check_versions(client: Client) -> None:
    """Compare what kernel, scheduler and present workers run.

    Raises
    ------
    VersionMismatch
        With a line for each difference, and what to install where.
    """
    here = versions()
    probe = _make_probe()
    scheduler = {"the scheduler": client.run_on_scheduler(probe)}
    addresses = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.workers))
    workers = client.sync(_ask_workers, client, probe, addresses)
    problems = list(_differences(here, scheduler, ("python", "nbelastic")))
    problems += _differences(here, workers, MUST_MATCH)
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
    """Run `probe` on all workers; one that does not answer is not waited for for long.

    Nor is one to which the connection breaks: it may just be dying. Neither is used until it has
    told its versions, and it is refused if they differ.
    """
    asked = [_ask(client, probe, address) for address in addresses]
    answers = await asyncio.gather(*asked)
    return {address: answer for answer in answers for address, answer in answer.items()}


async def _ask(client: Client, probe: Callable[[], dict[str, str]], address: str) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = await asyncio.wait_for(
            client._run(probe, workers=[address], on_error="return"), ANSWER_TIMEOUT
        )
    except asyncio.TimeoutError:
        return {}
    return {where: found for where, found in answer.items() if not isinstance(found, OSError)}


def _differences(
    here: dict[str, str], there: dict[str, Any], names: tuple[str, ...]
) -> Iterator[str]:
    for where, found in there.items():
        if isinstance(found, BaseException):
            yield f"{where} could not be asked: {found!r}"
            continue
        for name in names:
            if found.get(name) != here[name]:
                yield f"{where} has {name} {found.get(name)}, the kernel {here[name]}"


def _make_probe() -> Callable[[], dict[str, str]]:
    """Return a function that travels by value, since nbelastic may be missing where it goes."""

    def probe() -> dict[str, str]:
        import importlib.metadata
        import sys

        found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
        for name in ("nbelastic", "torch"):
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = "missing"
        return found

    return probe


def pack_function(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bytes:
    """Pickle a function with its arguments, behind a secret made for the job.

    Raises
    ------
    NotPicklable
        Naming the variable, argument or attribute that cannot travel.
    """
    try:
        payload = dumps((function, args, kwargs))
    except Exception as error:  # pickling runs code of any class
        culprit = _culprit(function, args, kwargs)
        raise NotPicklable(
            f"{culprit} cannot be sent to the workers: {error}. "
            "Make it inside the function instead, or pass what it is made from."
        ) from error
    if len(payload) > LARGE:
        sizes = sorted(_sizes(function, args, kwargs), reverse=True)[:3]
        largest = ", ".join(f"{name} {size / 2**20:.0f} MiB" for size, name in sizes)
        logger.warning(
            "the function takes %.0f MiB to each worker (%s); load large data on the workers",
            len(payload) / 2**20,
            largest,
        )
    return secrets.token_bytes(SECRET_BYTES) + payload


def unpack_function(
    payload: bytes,
) -> tuple[bytes, Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the job's secret, the function, and its arguments."""
    function, args, kwargs = cloudpickle.loads(memoryview(payload)[SECRET_BYTES:])
    return payload[:SECRET_BYTES], function, args, kwargs


def _parts(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield everything that travels, each with a name that the user knows it by."""
    for index, value in enumerate(args):
        yield f"args[{index}]", value
    for name, value in kwargs.items():
        yield f"the argument {name!r}", value
    for name, value in getattr(function, "captured", {}).items():
        yield f"the variable {name!r}", value
    inner = inspect.unwrap(function)
    if inspect.isfunction(inner):
        captured = inspect.getclosurevars(inner)
        for name, value in {**captured.globals, **captured.nonlocals}.items():
            yield f"the variable {name!r} that {inner.__name__}() uses", value
        for name, value in zip(
            inspect.signature(inner).parameters, inner.__defaults__ or (), strict=False
        ):
            yield f"the default of {name!r}", value


def _culprit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    for name, value in _parts(function, args, kwargs):
        if not _pickles(value):
            return f"{name} (a {type(value).__name__}{_inside(value)})"
    return f"the function {getattr(function, '__name__', function)!r}"


def _inside(value: Any) -> str:
    """Name the attribute or item of a value that does not pickle, if it is one."""
    for name, inner in _contents(value):
        if not _pickles(inner):
            return f"; there {name} is a {type(inner).__name__}"
    return ""


def _contents(value: Any) -> Iterator[tuple[str, Any]]:
    if inspect.isfunction(value):
        yield from _parts(value, (), {})
    elif isinstance(value, dict):
        yield from ((repr(key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"item {index}", item) for index, item in enumerate(value))
    elif hasattr(value, "__dict__"):
        yield from ((f"its attribute {key!r}", item) for key, item in vars(value).items())


def _pickles(value: Any) -> bool:
    try:
        dumps(value)
    except Exception:  # pickling runs code of any class
        return False
    return True


def _sizes(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[int, str]]:
    for name, value in _parts(function, args, kwargs):
        try:
            yield len(dumps(value)), name
        except (pickle.PicklingError, TypeError):
            continue
