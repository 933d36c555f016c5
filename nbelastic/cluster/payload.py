"""Describe the user's modules that travel with a job; unpack a job's payload.

Runs in the kernel, in the thread that calls ``fit``, and in workers, in the threads of ranks.
"""

from __future__ import annotations

import os
import pickle
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .wire import JobPayload

__all__ = ["Modules", "Source", "process_name", "unpack_call", "unpack_modules"]

_TOKEN = secrets.token_hex(8)


@dataclass(frozen=True)
class Source:
    """One module: where it lies in the kernel's file system, and its text.

    `text` is None for a directory without ``__init__.py``, which is a namespace package.
    """

    path: str
    text: bytes | None
    package: bool


@dataclass(frozen=True)
class Modules:
    """Modules that travel with a job.

    Attributes
    ----------
    sources : dict of str to Source
        By full module name.
    left_out : dict of str to str
        Modules that the function may need and that do not travel, with the reason.
    stale : frozenset of str
        Top-level names that a worker imports anew, since what it has may be older.
    digest : str
        Two jobs with equal digests have equal modules.
    process : str
        The process that has collected them, which has them imported.
    """

    sources: Mapping[str, Source] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    stale: frozenset[str] = frozenset()
    digest: str = ""
    process: str = ""

    def describe(self) -> str:
        """Return a line on the modules that travel, and one on each that does not."""
        found: dict[str, list[Source]] = {}
        for name, source in self.sources.items():
            if source.text is not None:
                found.setdefault(name.partition(".")[0], []).append(source)
        what = [f"{name} ({_size(sources)})" for name, sources in sorted(found.items())]
        lines = [f"modules that travel: {', '.join(what) or 'none'}\n"]
        lines += [f"left out: {name}, {why}\n" for name, why in sorted(self.left_out.items())]
        return "".join(lines)


def _size(sources: list[Source]) -> str:
    size = sum(len(source.text or b"") for source in sources)
    files = "1 file" if len(sources) == 1 else f"{len(sources)} files"
    return f"{files}, {size / 1024:,.1f} KiB"


def process_name() -> str:
    """Return a name of this process."""
    return f"{os.getpid()}-{_TOKEN}"


def unpack_modules(payload: JobPayload) -> Modules:
    """Return the modules of a payload."""
    modules: Modules = pickle.loads(payload.modules)
    return modules


def unpack_call(
    payload: JobPayload,
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the function and its arguments; its modules must be importable."""
    function, args, kwargs = cloudpickle.loads(payload.call)
    return function, args, kwargs
