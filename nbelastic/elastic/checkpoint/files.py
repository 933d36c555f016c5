"""Files of checkpoints: their places, and their order of trial.

::

    URL/run-0001-3f2a9c1e/                     one job; a later job has a larger number
        01-000002-0000000300.safetensors       loop, generation, commit
        resumed-from-run-0000-…                empty; names the run that this one continues

Incomplete files are skipped, and so are those that cannot be read.

The newest checkpoint of a run is that of the last generation, then of the last commit: an evicted
rank may write on for a while, but never in a newer generation.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from nbelastic.elastic.checkpoint.format import (
    Checkpoint,
    Header,
    StoredTensor,
    decode,
    encode,
    unstored,
)
from nbelastic.elastic.redaction import Secrets
from nbelastic.elastic.sampler import state_dict_of
from nbelastic.errors import NbelasticError

KEPT = 2  # checkpoints of a loop that are kept: the newest two

_RUN = re.compile(r"run-(\d{4,})-([0-9a-z]+)")
_FILE = re.compile(r"(\d+)-(\d+)-(\d+)\.safetensors")
_UNFINISHED = ".tmp"
_PARENT = "resumed-from-"


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Options of a rank's checkpoints."""

    # A directory, as a path or as a URL that fsspec knows. Dask logs what a task was called with.
    url: str = field(repr=False)
    run: str  # identifier of this job: letters and digits
    every: int  # commits between two checkpoints
    resume: bool = False  # whether to continue from the newest checkpoint of any job under `url`
    patience: float = 60.0  # seconds without a byte after which reading fails


class Entry(NamedTuple):
    """File of a run; entries sort by age."""

    loop: int
    generation: int
    version: int
    path: str


class CheckpointFiles:
    """Checkpoints under a URL, from the point of view of one job."""

    def __init__(self, url: str, run: str, on_progress: Callable[[], None] = lambda: None) -> None:
        self._on_progress = on_progress  # called for each directory, and every few megabytes
        self.url = url  # a directory: a local path, or a URL that fsspec knows
        self._run = run  # identifier of this job: letters and digits
        self._places: dict[str, str] = {}

    @cached_property
    def _storage(self) -> tuple[Any, str, bool]:
        """The file system, the directory's path in the file system, and whether it is local."""
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        system, root = url_to_fs(self.url)
        return system, root.rstrip("/"), isinstance(system, LocalFileSystem)

    # -- what is there ---------------------------------------------------------------------------

    def _names(self, directory: str) -> list[str]:
        system = self._storage[0]
        system.invalidate_cache()
        self._on_progress()
        try:
            found = system.ls(directory, detail=False)
            return [posixpath.basename(path.rstrip("/")) for path in found]
        except FileNotFoundError:
            return []

    def _runs(self) -> list[tuple[int, str, str]]:
        """Return number, job and directory of all runs, newest first."""
        root = self._storage[1]
        matches = filter(None, map(_RUN.fullmatch, self._names(root)))
        runs = [(int(m[1]), m[2], posixpath.join(root, m[0])) for m in matches]
        return sorted(runs, reverse=True)

    def _entries(self, directory: str, ending: str = "") -> list[Entry]:
        """Return the files of a run with an ending, newest first; by default, the finished ones."""
        found = []
        for name in self._names(directory):
            if name.endswith(ending) and (m := _FILE.fullmatch(name.removesuffix(ending))):
                path = posixpath.join(directory, name)
                found.append(Entry(int(m[1]), int(m[2]), int(m[3]), path))
        return sorted(found, reverse=True)

    def candidates(
        self, loop: int | None, *, others: bool, resumes: bool = False
    ) -> Iterator[Entry]:
        """Yield possible checkpoints of an elastic loop, in the order of preference.

        `loop` None stands for any, the last one first. With `others`, those of all other jobs
        follow after those of this job and the jobs that it continues. With `resumes`, the others
        must be one training, a run and those that it continues; else they are ambiguous.
        """
        runs = self._runs()
        self._places = {posixpath.basename(place): place for _, _, place in runs}
        order = self._lineage([place for _, run, place in runs if run == self._run])
        if others:
            more = [place for _, _, place in runs if place not in order]
            order += self._one_training(more) if resumes else more
        for place in order:
            yield from (e for e in self._entries(place) if loop in (None, e.loop))

    def _lineage(self, order: list[str]) -> list[str]:
        """Return runs and all that they continue, the newest first."""
        places, found = self._places, list(order)
        for place in found:  # grows by the runs that these continue
            parents = [n[len(_PARENT) :] for n in self._names(place) if n.startswith(_PARENT)]
            found.extend(places[n] for n in parents if n in places and places[n] not in found)
        return found

    def _one_training(self, places: list[str]) -> list[str]:
        """Return the last run of the only training, and the runs before."""
        newest = {place: own[0] for place in places if (own := self._entries(place))}
        lineages = {place: self._lineage([place]) for place in newest}
        continued = {each for lineage in lineages.values() for each in lineage[1:]}
        last = [place for place in newest if place not in continued]
        if len(last) > 1:
            said = ", ".join(
                f"{posixpath.basename(place)} (commit {newest[place].version})" for place in last
            )
            raise NbelasticError(
                f"{self._storage[1]} holds {len(last)} trainings that do not continue each other: "
                f"{said}. Move those that are not meant to another directory; a job that starts "
                "anew needs a directory of its own"
            )
        return lineages[last[0]] if last else []

    def paths(self) -> Iterator[str]:
        """Yield possible checkpoints, or the one file at the URL, in the order of preference."""
        system, root, _ = self._storage
        if not system.isdir(root):
            if system.exists(root):
                yield root
        elif _RUN.fullmatch(posixpath.basename(root)):
            yield from (entry.path for entry in self._entries(root))
        else:
            yield from (entry.path for entry in self.candidates(None, others=True))

    def read(self, path: str) -> Checkpoint | None:
        """Return the contents of a file; None if it is not a complete checkpoint."""
        system, _, local = self._storage
        try:
            size = system.info(path)["size"]
            with open(path, "rb") if local else system.open(path, "rb") as file:
                return decode(file, size, self._on_progress)
        except FileNotFoundError:
            return None
        except NbelasticError as error:
            raise NbelasticError(f"{path}: {error}") from None

    def first_readable(
        self, paths: Iterator[str], pass_over: Callable[[str], None], *, patient: bool = False
    ) -> tuple[str, Checkpoint] | None:
        """Return path and contents of the first complete checkpoint."""
        errors = []
        for path in paths:
            reason = "it is not complete, or no checkpoint of nbelastic"
            try:
                if (found := self.read(path)) is not None:
                    return path, found
            except OSError as error:
                if not patient or isinstance(error, TimeoutError):  # others would take as long
                    raise
                errors.append(error)
                reason = f"it cannot be read: {error!r}"
            pass_over(f"{path}: {reason}")
        if errors:
            raise errors[0]
        return None

    # -- writing ---------------------------------------------------------------------------------

    def write(
        self, header: Header, tensors: dict[str, StoredTensor], on_progress: Callable[[], None]
    ) -> str:
        """Write a checkpoint, then delete older ones; return its path."""
        system, _, local = self._storage
        directory = self._directory()
        path = posixpath.join(directory, header.file)
        temporary = path + _UNFINISHED
        try:
            with open(temporary, "wb") if local else system.open(temporary, "wb") as file:
                for chunk in encode(header, tensors):
                    on_progress()
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

    def record_parent(self, path: str) -> None:
        """Record that this job continues from another job's checkpoint."""
        parent = posixpath.basename(posixpath.dirname(path))
        directory = self._directory()
        if posixpath.basename(directory) != parent:
            self._storage[0].touch(posixpath.join(directory, _PARENT + parent))

    def _directory(self) -> str:
        """Return the directory of this job, made at the first call."""
        system, root, local = self._storage
        runs = self._runs()
        own = [place for _, run, place in runs if run == self._run]
        if own:
            return own[0]
        number = runs[0][0] + 1 if runs else 1  # jobs that start at once may have the same
        directory = posixpath.join(root, f"run-{number:04d}-{self._run}")
        system.makedirs(directory, exist_ok=True)
        if local:
            _sync_directory(root)
        return directory

    def _tidy(self, directory: str, written: Header) -> None:
        """Delete all but the newest complete files, and unfinished ones of earlier writers."""
        mark = (written.loop, written.generation, written.version)
        finished, unfinished = (
            [each for each in self._entries(directory, ending) if each.loop == written.loop]
            for ending in ("", _UNFINISHED)
        )
        for entry in [*finished[KEPT:], *(each for each in unfinished if each[:3] < mark)]:
            with contextlib.suppress(OSError):  # it does no harm
                self._storage[0].rm_file(entry.path)


def _sync_directory(path: str) -> None:
    """Make new and renamed entries of a directory survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of a checkpoint, without a job.

    Parameters
    ----------
    path : str or path-like
        A checkpoint file, or a directory or URL as ``fit(checkpoint=...)`` takes it. Of a
        directory, the newest complete checkpoint is read: that of the last run, and of the last
        elastic loop of its function. The directory of one run will do, too.

    Returns
    -------
    dict
        The values of the state by the names that the training function gave them. Models,
        optimizers, schedulers, samplers and other objects are state dicts, for
        ``load_state_dict``. A ``torch.Generator`` is its state. All tensors are on the CPU.

    Raises
    ------
    FileNotFoundError
        There is no checkpoint.
    NbelasticError
        It is not complete, has another format, or its values cannot be unpickled here.

    Warnings
    --------
    Values other than tensors are unpickled, which can run any code. Load only files that you trust.
    For the tensors of a file that you do not trust, use ``safetensors``.

    See Also
    --------
    fit : ``checkpoint=`` writes these files, ``resume=True`` continues from them.

    Notes
    -----
    The files are in the format of safetensors. ``safetensors.torch.load_file(path)`` reads
    their tensors under names such as ``model.0.weight`` and ``optimizer.state.0.exp_avg``.

    Examples
    --------
    >>> loaded = nbelastic.load_checkpoint("/shared/resnet")  # doctest: +SKIP
    >>> model.load_state_dict(loaded["model"])  # doctest: +SKIP
    >>> loaded["epoch"]  # doctest: +SKIP
    3
    """
    url = os.fspath(path)
    secrets, passed_over = Secrets([url]), list[str]()
    shown = secrets.hide(url)
    try:
        files = CheckpointFiles(url, run="")
        found = files.first_readable(files.paths(), passed_over.append)
    except NbelasticError:
        raise
    except Exception as error:  # file systems raise any type, and quote the URL
        if isinstance(error, OSError) and secrets.shown(error):
            raise
        raise NbelasticError(f"{shown} cannot be read: {secrets.hide(repr(error))}") from None
    if found is None:
        missing = f"no checkpoint in {shown}"
        if passed_over:
            raise NbelasticError(f"{missing}: {secrets.hide('; '.join(passed_over))}")
        raise FileNotFoundError(missing)
    path, (_, tensors) = found
    try:
        payload, (as_dict, progress) = unstored(tensors)
        values: dict[str, Any] = as_dict(payload, [state_dict_of(each) for each in progress])
    except Exception as error:  # classes of the user may be missing, or raise anything
        raise NbelasticError(
            f"{secrets.hide(path)}: its values cannot be unpickled: {error!r}. Import the "
            "modules that define their classes; to read only the tensors, use safetensors"
        ) from error
    return {name: value for name, value in values.items() if not name.startswith("_")}
