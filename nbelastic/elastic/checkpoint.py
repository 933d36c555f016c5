"""Checkpoints: commits that are also written to disk, in the background, while training goes on.

Rank 0 writes. Which commits are written is the same on all ranks, as is what samplers have left
there: the ranks settle that together, so that a job which goes on from a checkpoint deals exactly
the samples that nobody had done. Random generators are not part of it; they stay each rank's own.

What goes into a file is copied at the commit; the rest is done by a thread of its own. While that
is busy, further checkpoints are left out. Nothing that goes wrong with a file ends the training: it
is told, once, in the job's history.

A job reads a checkpoint when it begins and has been told to resume, or when all its ranks were lost
at once: the rank that is the state's source loads it, the others receive it as newcomers do.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbelastic.elastic.checkpoint_files import CheckpointFiles
from nbelastic.elastic.checkpoint_format import Header
from nbelastic.elastic.checkpoint_writer import Writer
from nbelastic.elastic.parcel import Parcel, flatten, unflatten
from nbelastic.elastic.state import ObjectState
from nbelastic.elastic.transfer import allgather_object
from nbelastic.errors import NbelasticError, OptionError, StateMismatch, Stopped
from nbelastic.membership import FRESH, RankNote

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbelastic.elastic.sampler import ShardSampler
    from nbelastic.elastic.session import Session
    from nbelastic.elastic.shards import Deal
    from nbelastic.elastic.state import State
    from nbelastic.membership import Plan

__all__ = ["CheckpointSpec", "Checkpoints", "keeping"]

LAST_WAIT = 600.0
"""Most seconds that the end of a loop waits for its last checkpoint."""

STOP_WAIT = 5.0
"""Most seconds that a rank which is stopped at a commit takes to write it."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """What a rank is told about checkpoints.

    Attributes
    ----------
    url : str
        Where: a directory, as a path or as a URL that fsspec knows.
    run : str
        What tells this job from all others: letters and digits.
    every : int
        Commits between two checkpoints.
    resume : bool
        Whether to go on from the newest checkpoint of any job under `url`.
    """

    url: str
    run: str
    every: int
    resume: bool = False


@contextlib.contextmanager
def keeping(session: Session, state: State, loop: int) -> Iterator[Checkpoints]:
    """Keep the checkpoints of an elastic loop, for the length of a ``with`` block."""
    checkpoints = Checkpoints(session, state, loop)
    if session.spec.checkpoint is not None:
        state._checkpoints = checkpoints
    try:
        yield checkpoints
    except Stopped:
        checkpoints.stop()
        raise
    except BaseException:
        checkpoints.abandon()
        raise
    finally:
        state._checkpoints = None


class Checkpoints:
    """The checkpoints of one elastic loop, on one rank. Does nothing where the job has none.

    Parameters
    ----------
    session : Session
        The rank.
    state : State
        What the loop trains.
    loop : int
        Which loop of the function, from 1.
    """

    def __init__(self, session: Session, state: State, loop: int) -> None:
        self._session = session
        self._loop = loop
        self._told: set[str] = set()
        self._begun = False
        self._found: Header | None = None
        self._looked = False
        self._has_left = False
        spec = session.spec.checkpoint
        self._active = spec is not None
        if spec is None:
            return
        if not isinstance(state, ObjectState):
            raise OptionError(
                f"checkpoint={spec.url!r}: a {type(state).__name__} cannot be written to disk; "
                "derive it from ObjectState or TorchState"
            )
        self._spec = spec
        self._state = state
        self._files = CheckpointFiles(spec.url, spec.run)
        self._writer = Writer(self._files, self._tell)

    # -- reading ---------------------------------------------------------------------------------

    def load(self, plan: Plan) -> bool:
        """Load the newest checkpoint, if this is the source of a loop that has not begun.

        Returns
        -------
        bool
            Whether it was made by another number of ranks.
        """
        self._has_left = False
        is_source = self._session.rank == plan.source
        if not (self._active and is_source and self._beginning(plan)):
            return False
        if not self._looked:
            self._found = self._load_newest()
            self._looked = True
        return self._found is not None and self._found.size != self._session.size

    def _beginning(self, plan: Plan) -> bool:
        return plan.version == FRESH if self._loop == 1 else not self._begun

    def behind(self, plan: Plan) -> Sequence[int]:
        """Return who must receive the state: all others, where the source has loaded it.

        In the first loop they must anyway. All ranks call this at once.
        """
        if not self._active or self._loop == 1:
            return plan.behind
        mine = not self._begun and self._found is not None
        if not allgather_object(self._session.communicator(), mine)[plan.source]:
            return plan.behind
        return [rank for rank in range(self._session.size) if rank != plan.source]

    def begun(self) -> None:
        """Note that this rank has the state of the loop: nothing is loaded any more."""
        self._begun = True

    def _load_newest(self) -> Header | None:
        spec = self._spec
        try:
            return self._load_first()
        except NbelasticError:
            raise
        except Exception as error:  # file systems raise what they like
            if spec.resume:
                raise NbelasticError(f"checkpoint={spec.url!r} cannot be read: {error}") from error
            self._tell(f"{spec.url} cannot be read: {error!r}")
            return None

    def _load_first(self) -> Header | None:
        spec = self._spec
        for entry in self._files.candidates(self._loop, others=spec.resume and self._loop == 1):
            loaded = self._files.read(entry.path, self._moved)
            if loaded is not None:
                header, payload = loaded
                self._take_over(entry.path, header, payload)
                return header
            self._tell(f"passed over {entry.path}: it is not complete")
        if spec.resume and self._loop == 1:
            self._tell(f"nothing to resume from in {spec.url}: it starts from the beginning")
        return None

    def _take_over(self, path: str, header: Header, payload: bytearray) -> None:
        import torch

        session, state = self._session, self._state
        parcel = unflatten(torch.frombuffer(payload, dtype=torch.uint8), header.index)
        head, wires = pickle.loads(parcel.head)
        samplers = state._samplers()
        lengths = [wire[0] for wire in wires]
        if lengths != [len(sampler.dataset) for sampler in samplers]:
            raise StateMismatch(
                f"{path} was made with samplers of {lengths} samples; "
                f"now they have {[len(sampler.dataset) for sampler in samplers]}"
            )
        try:
            state._unpack(Parcel(head, parcel.tensors, parcel.devices))
        except StateMismatch as error:
            raise StateMismatch(
                f"{path} does not fit the state that the function has built: {error}. Build what "
                "it was made of, or train without it (resume=False, or another directory)"
            ) from None
        except Exception as error:  # whatever the user's classes raise: it must not pass as theirs
            raise NbelasticError(f"{path} does not fit the state: {error}") from error
        for sampler, wire in zip(samplers, wires, strict=True):
            deal = sampler.unpack(wire, session.size)
            sampler.install(deal, session.rank, resumed=True)
        state.save()
        self._tell(f"goes on from {path} (commit {header.version} of job {header.job})")
        with contextlib.suppress(OSError):  # needed by a second loop only
            self._files.descend(path)

    # -- writing ---------------------------------------------------------------------------------

    def committed(self) -> None:
        """Write the commit just made, if it is its turn. All ranks call this at once.

        Raises
        ------
        CollectiveError
            A peer is gone.
        """
        if self._session.version % self._spec.every == 0:
            from nbelastic.elastic.settlement import settle_together

            deals = settle_together(self._samplers_at_commit(), self._session)
            if self._session.rank == 0 and not self._writer.busy:
                self._begin(deals)

    def left(self) -> None:
        """Note that the generation was left as planned, at the last commit."""
        self._has_left = True

    def finish(self) -> None:
        """Write the last commit of the loop, and wait until it is written."""
        if self._active and self._session.rank == 0:
            self._write_last(LAST_WAIT)

    def stop(self) -> None:
        """End here; if that is at a commit, the job may want to go on from it."""
        if self._active and self._session.rank == 0 and self._has_left:
            self._write_last(STOP_WAIT)
        self.abandon()

    def abandon(self) -> None:
        """Give up what is under way: nothing of it is left."""
        if self._active:
            self._writer.abandon()

    def _write_last(self, longest: float) -> None:
        deadline = time.monotonic() + longest
        self._writer.wait(deadline, self._moved)
        present = (self._session.generation, self._session.version)
        if self._writer.written != present and not self._writer.busy:
            self._begin(self._settle_alone())
            self._writer.wait(deadline, self._moved)
        if self._writer.busy:
            self._tell(f"the last one was given up after {longest:g} s")
            self._writer.abandon()

    def _samplers_at_commit(self) -> list[ShardSampler]:
        """Return samplers as they were at the last commit, whatever was done since."""
        twins = []
        for sampler, snapshot in self._state._samplers_at_commit():
            twin = copy.copy(sampler)
            twin.go_back(snapshot)
            twins.append(twin)
        return twins

    def _settle_alone(self) -> list[Deal]:
        """Return what is left at the last commit, where ranks cannot or need not come together.

        The others have done the same positions of their shares as this rank: exact in lockstep.
        """
        size = self._session.size
        return [twin.settle([twin.claim()], size) for twin in self._samplers_at_commit()]

    def _begin(self, deals: Sequence[Deal]) -> None:
        """Copy the last commit, and have it written."""
        try:
            self._writer.begin(*self._copy(deals))
        except (
            Exception
        ) as error:  # pickling runs code of any class; memory or threads may be short
            self._tell(f"the state cannot be copied: {error!r}")

    def _copy(self, deals: Sequence[Deal]) -> tuple[Header, Iterator[memoryview]]:
        session = self._session
        parcel = self._state._pack_commit()
        devices = parcel.devices or [tensor.device.type for tensor in parcel.tensors]
        tensors = [tensor.detach().to("cpu", copy=True) for tensor in parcel.tensors]
        head = pickle.dumps((parcel.head, [deal.pack() for deal in deals]))
        index, lengths, pieces = flatten(Parcel(head, tensors, devices))
        header = Header(
            job=session.spec.job,
            loop=self._loop,
            generation=session.generation,
            version=session.version,
            size=session.size,
            index=index,
            payload=sum(lengths),
        )
        return header, (piece.numpy().data for piece in pieces)

    def _moved(self) -> None:
        """Count as getting on: something takes long here, but it moves."""
        self._session.moves += 1

    def _tell(self, detail: str) -> None:
        """Put something into the job's history, once."""
        if detail not in self._told:
            self._told.add(detail)
            note = RankNote(self._session.spec.start, about="checkpoint", detail=detail)
            self._session.port.report(note)
