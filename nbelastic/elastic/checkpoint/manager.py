"""Checkpoints of an elastic loop: commits to write, and a file to load.

Rank 0 writes, in a thread of its own, what was copied at the commit. While it is busy, further
checkpoints are left out. All ranks agree on the progress of samplers in a commit that is written,
so a resumed job deals exactly the samples that no rank had done. Random generators are not
included. Errors of files never end the training; the job's history reports each once.

A job reads a checkpoint when it resumes, or when all its ranks were lost: the rank that is the
source loads it, and the others receive the state as newcomers do.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, TypeVar

from nbelastic.elastic.checkpoint.files import CheckpointFiles
from nbelastic.elastic.checkpoint.format import Checkpoint, Header, StoredTensor, stored, unstored
from nbelastic.elastic.redaction import Secrets
from nbelastic.elastic.sampler import SamplerProgress, agree_on_progress
from nbelastic.elastic.state import ObjectState, State
from nbelastic.elastic.state.transfer import allgather_object
from nbelastic.errors import Leaving, NbelasticError, OptionError, StateMismatch, Stopped
from nbelastic.messages import FRESH, Plan

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.session import Session

T = TypeVar("T")

ABANDON_WAIT = 2.0
"""Most seconds to wait for a thread after cancelling it: a file system may never return."""

LAST_WAIT = 600.0  # most seconds that the end of a loop waits for its last checkpoint
STOP_WAIT = 5.0  # most seconds that a rank which is stopped at a commit takes to write it


class Abandoned(Exception):
    """The call was cancelled."""


class FileThread:
    """Thread for one call at a time, ended by the answer of its file system.

    The called function must call :meth:`step` every few megabytes.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._cancelled = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether the function has not returned yet."""
        return self._thread is not None and self._thread.is_alive()

    def call(self, function: Callable[[], T]) -> futures.Future[T]:
        """Begin a call, and return what will have its outcome. Not while busy."""
        outcome: futures.Future[T] = futures.Future()

        def run() -> None:
            try:
                outcome.set_result(function())
            except BaseException as error:  # the waiting thread raises it again
                outcome.set_exception(error)

        self._thread = threading.Thread(target=run, name="nbelastic-checkpoint", daemon=True)
        self._thread.start()
        return outcome

    def step(self) -> None:
        """Record progress; end the call here if it is cancelled."""
        self._steps += 1
        if self._cancelled:
            raise Abandoned

    def wait(
        self,
        on_progress: Callable[[], None] = lambda: None,
        *,
        deadline: float = math.inf,
        patience: float = math.inf,
    ) -> None:
        """Wait for the end, or until `deadline` by the monotonic clock.

        Without progress for `patience` seconds, TimeoutError is raised. This rank can be
        interrupted meanwhile. Either cancels the call.
        """
        seen, since = self._steps, time.monotonic()
        try:
            while self._thread is not None and self.busy and time.monotonic() < deadline:
                self._thread.join(min(0.1, patience / 4))
                if self._steps != seen:
                    seen, since = self._steps, time.monotonic()
                    on_progress()
                elif time.monotonic() - since > patience:
                    raise TimeoutError(f"nothing was read for {patience:g} s")
        except BaseException:
            self._cancelled = True
            raise
        on_progress()

    def abandon(self) -> None:
        """Cancel the call: neither its thread nor its file remains."""
        self._cancelled = True
        self.wait(deadline=time.monotonic() + ABANDON_WAIT)


class CheckpointManager:
    """Checkpoints of an elastic loop on a rank, for the length of a ``with`` block.

    It does nothing if the job has none. (A generator would set the traceback of users' exceptions.)
    """

    def __init__(self, session: Session, state: State, loop: int) -> None:
        self._session = session
        self._loop = loop  # number of the loop in the function, from 1
        self._reported: set[str] = set()
        self._found: Header | None = None
        self._looked = False
        self.begun = False  # this rank has the state of the loop, and needs no checkpoint later
        self.left = False  # the generation was left as planned, at the last commit
        self.commits = 0  # of the checkpoint from which the present generation goes on
        spec = session.spec.checkpoint
        self._active = spec is not None
        if spec is None:
            return
        self._secrets = Secrets([spec.url])
        option = f"checkpoint={self._secrets.hide(spec.url)!r}"
        if not isinstance(state, ObjectState):
            raise OptionError(
                f"{option}: a {type(state).__name__} cannot be "
                "written to disk; derive it from ObjectState or TorchState"
            )
        unwritable = ", state.".join(state._unwritable())
        if unwritable:
            raise OptionError(
                f"{option}: handlers of yours keep "
                f"state.{unwritable}, and a checkpoint cannot have what "
                "they keep. Give the values state_dict() and load_state_dict() instead"
            )
        self._spec = spec
        self._state = state
        self._files = CheckpointFiles(spec.url, spec.run)
        self._writer = FileThread()
        self._written: tuple[int, int] | None = None  # generation and commit of the newest
        self._well = False  # the latest could be written

    def __enter__(self) -> CheckpointManager:
        if self._active:
            self._state._on_commit += (self.committed,)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not self._active:
            return
        session = self._session
        if issubclass(kind, Stopped):
            if session.rank == 0 and self.left:  # for a job that resumes
                self._write_last(STOP_WAIT)
        elif issubclass(kind, Leaving) and session.time_to_save and session.version > 0:
            self._write_last(session.time_to_save)
            if self._written == (session.generation, session.version):
                self._report(f"commit {session.version} is written: no other rank had the state")
        self._writer.abandon()  # neither thread nor unfinished file remains

    # -- reading ---------------------------------------------------------------------------------

    def begin(self, plan: Plan) -> tuple[bool, Sequence[int]]:
        """Load the newest checkpoint, if this rank is the source and the loop has not begun.

        Returns whether another number of ranks has made it, and the ranks that must receive the
        state. All ranks call this together.
        """
        session = self._session
        self.left, self.commits = False, 0
        if not self._active or (self._loop == 1 and plan.version != FRESH):
            return False, plan.behind
        if session.rank == plan.source and not (self.begun or self._looked):
            self._found = self._load_newest()
            self._looked = True
        found = None if self.begun else self._found
        mine = None if found is None else found.version
        loaded = allgather_object(session.communicator(), mine)[plan.source]
        if loaded is None:
            return False, plan.behind
        self.commits = loaded
        receivers = [rank for rank in range(session.size) if rank != plan.source]
        return found is not None and found.size != session.size, receivers

    def _load_newest(self) -> Header | None:
        spec, others = self._spec, self._spec.resume and self._loop == 1
        reader = FileThread()
        files = CheckpointFiles(spec.url, spec.run, reader.step)

        def find() -> tuple[str, Checkpoint] | None:
            entries = files.candidates(self._loop, others=others, resumes=True)
            pass_over = lambda reason: self._report(f"passed over {reason}")  # noqa: E731
            return files.first_readable((e.path for e in entries), pass_over, patient=True)

        try:
            outcome = reader.call(find)
            reader.wait(self._on_progress, patience=spec.patience)
            found = outcome.result()
            if found is not None:
                self._take_over(*found)
        except NbelasticError as error:
            if self._secrets.hide(str(error)) == str(error):
                raise
            raise type(error)(self._secrets.hide(str(error))) from None
        except Exception as error:  # file systems raise what they like
            if spec.resume:
                reason = self._secrets.hide(str(error) or repr(error))
                shown = self._secrets.hide(spec.url)
                problem = NbelasticError(f"checkpoint={shown!r} cannot be read: {reason}")
                raise problem from self._secrets.shown(error)
            self._report(f"{spec.url} cannot be read: {error!r}")
            return None
        if found is None and others:
            self._report(f"nothing to resume from in {spec.url}: it starts from the beginning")
        return None if found is None else found[1][0]

    def _take_over(self, path: str, checkpoint: Checkpoint) -> None:
        session, state, (header, tensors) = self._session, self._state, checkpoint
        payload, (_, progress) = unstored(tensors)
        samplers = state._samplers()
        # The length of an epoch that a user's own sampler draws is known when it is drawn again.
        lengths = [None if each.shuffle is None else each.length for each in progress]
        now = [None if each.shuffle is None else len(each.dataset) for each in samplers]
        if lengths != now:
            raise StateMismatch(
                f"{path} was made with samplers of {lengths} samples; now they have {now}"
            )
        try:
            state._unpack(payload)
        except StateMismatch as error:
            raise StateMismatch(
                f"{path} does not fit the state that the function has built: {error}. Build what "
                "it was made of, or train without it (resume=False, or another directory)"
            ) from None
        except Exception as error:  # whatever the user's classes raise: it must not pass as theirs
            raise NbelasticError(f"{path} does not fit the state: {error}") from error
        for sampler, each in zip(samplers, progress, strict=True):
            sampler.install(each, session.rank, session.size, resumed=True)
        state.save()
        self._report(f"goes on from {path} (commit {header.version} of job {header.job})")
        with contextlib.suppress(Exception):  # needed by a second loop only
            self._files.record_parent(path)

    # -- writing ---------------------------------------------------------------------------------

    def committed(self) -> None:
        """Write the last commit, if it is due. All ranks call this together."""
        if self._session.version % self._spec.every == 0:
            progress = agree_on_progress(self._state._progress_at_commit(), self._session)
            if self._session.rank == 0 and not self._writer.busy:
                self._begin(progress)

    def finish(self) -> None:
        """Write the last commit of the loop, and wait for it."""
        if self._active and self._session.rank == 0:
            self._write_last(LAST_WAIT)

    def _write_last(self, longest: float) -> None:
        deadline = time.monotonic() + longest
        self._writer.wait(self._on_progress, deadline=deadline)
        present = (self._session.generation, self._session.version)
        if self._written != present and not self._writer.busy:
            self._begin(self._state._progress_at_commit())
        self._writer.wait(self._on_progress, deadline=deadline)
        if self._writer.busy:
            self._report(f"the last one was given up after {longest:g} s")
            self._writer.abandon()

    def _begin(self, progress: Sequence[SamplerProgress]) -> None:
        """Copy the last commit, and begin to write it."""
        session, state = self._session, self._state
        numbers = session.generation, session.version, session.size
        header = Header(session.spec.job, self._loop, *numbers)
        try:
            tensors = stored(state._pack_commit(), (type(state)._as_dict, list(progress)))
            self._writer.call(functools.partial(self._write, header, tensors))
        except Exception as error:  # classes raise anything; memory or threads may be short
            known = isinstance(error, NbelasticError)
            self._report(f"the state cannot be copied: {error if known else repr(error)}")

    def _write(self, header: Header, tensors: dict[str, StoredTensor]) -> None:
        """Write a checkpoint, in the thread for it."""
        try:
            path = self._files.write(header, tensors, self._writer.step)
        except Abandoned:
            pass
        except Exception as error:  # file systems raise what they like; training goes on regardless
            self._well = False
            reason = isinstance(error, OSError) and error.strerror  # the file's name would differ
            self._report(f"{self._files.url} cannot be written: {reason or repr(error)}")
        else:
            self._written = (header.generation, header.version)
            if not self._well:
                self._well = True
                self._report(f"commit {header.version} is in {path}")

    def _on_progress(self) -> None:
        """Count as progress, so that a long transfer is not taken for a hang."""
        self._session.moves += 1

    def _report(self, detail: str) -> None:
        """Report to the job's history, each text once and without the URL's secrets."""
        detail = self._secrets.hide(detail)
        if detail not in self._reported:
            self._reported.add(detail)
            self._session.note("checkpoint", detail)
