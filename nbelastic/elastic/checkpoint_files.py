"""Checkpoints as files: where they lie, and which is the newest that is complete.

::

    URL/run-0001-3f2a9c1e/                     one job; the number grows with each job
        01-000002-0000000300.nbe               loop, generation, commit
        resumed-from-run-0000-…                empty; names the run that this one has gone on from

What is in a file is in :mod:`.checkpoint_format`. One that is not complete is passed over.

Which of a run's is newest goes by generation, then by commit: a rank that the job has parted with
may write on for a while, but never in a newer generation.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from nbelastic.elastic.checkpoint_format import decode, encode
from nbelastic.errors import NbelasticError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nbelastic.elastic.checkpoint_format import Header

__all__ = ["KEPT", "CheckpointFiles", "Entry"]

KEPT = 2
"""Checkpoints of a loop that are kept: the newest, and the one before."""

_RUN = re.compile(r"run-(\d{4,})-([0-9a-z]+)")
_FILE = re.compile(r"(\d+)-(\d+)-(\d+)\.nbe(\.tmp)?")
_PARENT = "resumed-from-"


class Entry(NamedTuple):
    """A file of a run, complete or not; entries sort by age."""

    loop: int
    generation: int
    version: int
    temporary: bool
    path: str


class CheckpointFiles:
    """The checkpoints under a URL, seen by one job.

    Parameters
    ----------
    url : str
        A directory: a local path, or a URL that fsspec knows.
    run : str
        What tells this job from all others: letters and digits.
    """

    def __init__(self, url: str, run: str) -> None:
        self.url = url
        self._run = run

    @cached_property
    def _storage(self) -> tuple[Any, str, bool]:
        """The file system, the directory's path in it, and whether it is this machine's."""
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        system, root = url_to_fs(self.url)
        return system, root.rstrip("/"), isinstance(system, LocalFileSystem)

    # -- what is there ---------------------------------------------------------------------------

    def _names(self, directory: str) -> list[str]:
        system = self._storage[0]
        system.invalidate_cache()
        try:
            return [
                posixpath.basename(path.rstrip("/")) for path in system.ls(directory, detail=False)
            ]
        except FileNotFoundError:
            return []

    def _runs(self) -> list[tuple[int, str, str]]:
        """Return number, job and directory of all runs, the newest first."""
        root = self._storage[1]
        matches = [_RUN.fullmatch(name) for name in self._names(root)]
        runs = [(int(m[1]), m[2], posixpath.join(root, m[0])) for m in matches if m]
        return sorted(runs, reverse=True)

    def _entries(self, directory: str) -> list[Entry]:
        """Return what is there of a run, the newest first."""
        matches = [_FILE.fullmatch(name) for name in self._names(directory)]
        return sorted(
            (
                Entry(int(m[1]), int(m[2]), int(m[3]), bool(m[4]), posixpath.join(directory, m[0]))
                for m in matches
                if m
            ),
            reverse=True,
        )

    def candidates(self, loop: int, *, others: bool) -> Iterator[Entry]:
        """Yield what may be a checkpoint of an elastic loop, in the order of preference.

        Parameters
        ----------
        loop : int
            Which elastic loop.
        others : bool
            Whether to look at all other jobs' too, after this one's and those that it has gone on
            from.
        """
        runs = self._runs()
        places = {posixpath.basename(place): place for _, _, place in runs}
        order = [place for _, run, place in runs if run == self._run]
        for place in order:  # grows: the run that this one has gone on from, and so on
            parents = [n[len(_PARENT) :] for n in self._names(place) if n.startswith(_PARENT)]
            order.extend(places[n] for n in parents if n in places and places[n] not in order)
        if others:
            order.extend(place for _, _, place in runs if place not in order)
        for place in order:
            for entry in self._entries(place):
                if entry.loop == loop and not entry.temporary:
                    yield entry

    def read(
        self, path: str, moving: Callable[[], None] = lambda: None
    ) -> tuple[Header, bytearray] | None:
        """Return header and payload of a file; None if it is not a complete checkpoint.

        `moving` is called every few megabytes.
        """
        system = self._storage[0]
        try:
            with system.open(path, "rb") as file:
                return decode(file, system.size(path), moving)
        except FileNotFoundError:
            return None
        except NbelasticError as error:
            raise NbelasticError(f"{path}: {error}") from None

    # -- writing ---------------------------------------------------------------------------------

    def write(
        self, header: Header, payload: Iterable[memoryview], moving: Callable[[], None]
    ) -> str:
        """Write a checkpoint, then delete older ones.

        Parameters
        ----------
        header, payload
            What to write.
        moving : callable
            Called every few megabytes; what it raises ends this, and nothing is left of it.

        Returns
        -------
        str
            Where it is.

        Raises
        ------
        OSError
            It cannot be written. What was there before is still there.
        """
        system, _, local = self._storage
        directory = self._directory()
        path = posixpath.join(directory, header.file)
        temporary = path + ".tmp"
        try:
            with open(temporary, "wb") if local else system.open(temporary, "wb") as file:
                for chunk in encode(header, payload):
                    moving()
                    file.write(chunk)
                if local:
                    file.flush()
                    os.fsync(file.fileno())
            if local:
                os.replace(temporary, path)
                _sync_directory(directory)
            else:
                system.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                system.rm_file(temporary)
            raise
        self._tidy(directory, header)
        return path

    def descend(self, path: str) -> None:
        """Note that this job goes on from another one's checkpoint."""
        parent = posixpath.basename(posixpath.dirname(path))
        directory = self._directory()
        if posixpath.basename(directory) != parent:
            with self._storage[0].open(posixpath.join(directory, _PARENT + parent), "wb"):
                pass

    def _directory(self) -> str:
        """Return the directory of this job; made when first asked for."""
        system, root, local = self._storage
        runs = self._runs()
        own = [place for _, run, place in runs if run == self._run]
        if own:
            return own[0]
        number = runs[0][0] + 1 if runs else 1
        directory = posixpath.join(root, f"run-{number:04d}-{self._run}")
        system.makedirs(directory, exist_ok=True)
        if local:
            _sync_directory(root)
        return directory

    def _tidy(self, directory: str, written: Header) -> None:
        """Delete all but the newest complete ones, and what older writers have left unfinished."""
        entries = [e for e in self._entries(directory) if e.loop == written.loop]
        complete = [entry for entry in entries if not entry.temporary]
        mark = (written.generation, written.version)
        torn = [e for e in entries if e.temporary and (e.generation, e.version) < mark]
        for entry in [*complete[KEPT:], *torn]:
            with contextlib.suppress(FileNotFoundError):
                self._storage[0].rm_file(entry.path)


def _sync_directory(path: str) -> None:
    """Make what was renamed or made in a directory outlast a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
