"""One rank's side of the membership: it reports ready, receives plans, and can be interrupted.

Who does what
-------------
The *rank's thread* runs the user's function and every method of :class:`Session` but ``on_…`` and
``beat``. The *agent's thread* (an event loop) delivers messages through ``on_…``; these never
block: they note what has come, under the one lock, wake the rank's thread, and break its
communicator where its generation is over. Nothing else is shared.

Where the rank can be
---------------------
============  ====================================================================================
outside       setting up, or done with a generation; reported nothing, or that it has left
waiting       has reported ready(left = newest generation heard of), waits for a later plan
forming       has taken a plan, connects; an abort of that generation frees it
member        has reported formed; trains. Its generation ends by an abort, or at an agreed step
parked        its elastic loop has returned; waits until all have, or for an abort
============  ====================================================================================

Messages may be late. ``_heard`` is the newest generation that a plan or an abort has named: what is
not newer changes nothing, and an abort that overtakes its plan makes the rank report ready again.
An order to end is final; it is obeyed where the rank waits, at its next call, or in user code by an
exception raised in its thread (never in here: see :mod:`nbelastic.elastic.interrupt`).
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from nbelastic.collectives import connect
from nbelastic.elastic.context import Context, one_of_all
from nbelastic.elastic.doubts import Doubts
from nbelastic.elastic.phases import Phases
from nbelastic.elastic.port import REAL
from nbelastic.elastic.preparation import prepare
from nbelastic.elastic.vitals import Vitals
from nbelastic.errors import (
    CollectiveError,
    Evicted,
    HostsUpdatedInterrupt,
    Leaving,
    RankExit,
    Stopped,
)
from nbelastic.membership import (
    FRESH,
    Beat,
    LoopDone,
    Place,
    Plan,
    RankFormed,
    RankNote,
    RankReady,
    place_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbelastic.collectives import Communicator, Store
    from nbelastic.elastic.port import Means, Port, RankSpec

__all__ = ["Session"]

_EXITS: dict[str, type[RankExit]] = {"leave": Leaving, "evict": Evicted}


class Session(Context):
    """A rank of a job; made, used and closed in the thread that runs the user's function."""

    def __init__(self, spec: RankSpec, port: Port, means: Means = REAL) -> None:
        self.spec = spec
        self.port = port
        self._means = means
        self.secret = b""  # the job's: it comes with the function, before any of it runs
        self.vitals, self.phases = Vitals(), Phases()
        self._interrupt = means.interrupt()
        self._changed = means.condition()
        self._store: Store | None = None
        self._communicator: Communicator | None = None
        self._heard = self._aborted = self._released = self._noticed = 0
        self._next_plan: Plan | None = None
        self._end: tuple[str, str] | None = None
        self._member = self._parked = False
        self._carried: bool | None = None
        self._doubts = Doubts(means.probe)
        self._loops = self.moves = 0
        self.plan: Plan | None = None
        self.version = FRESH
        self.generation = self.source = 0
        self._take_place(spec.place)

    # -- what the agent delivers ---------------------------------------------------------------

    def on_plan(self, plan: Plan) -> None:
        """Take in a plan that names this rank."""
        with self._changed:
            if plan.generation > self._heard:
                self._heard = plan.generation
                self._next_plan = plan
                self._changed.notify_all()

    def on_abort(self, generation: int, reason: str) -> None:
        """Take in that a generation is over."""
        with self._changed:
            self._heard = max(self._heard, generation)
            self._aborted = max(self._aborted, generation)
            if self._next_plan is not None and self._next_plan.generation <= generation:
                self._next_plan = None
            if self.generation <= generation and self._communicator is not None:
                self.phases.begin()
                self._communicator.abort(reason)
            self._member = self._member and self.generation > generation
            self._changed.notify_all()

    def on_notice(self, generation: int) -> None:
        """Take in that the membership of a generation is about to change."""
        with self._changed:
            self._noticed = max(self._noticed, generation)

    def on_release(self, generation: int) -> None:
        """Take in that all members of a generation have left their elastic loop."""
        with self._changed:
            self._released = max(self._released, generation)
            self._changed.notify_all()

    def on_end(self, how: str, reason: str) -> None:
        """Take in that this rank is to end; the first such order but ``leave`` is final."""
        with self._changed:
            if self._end is not None and self._end[0] != "leave":
                return
            self._end = (how, reason)
            if how == "leave" and self._member:
                return  # at the step that all members agree on
            if self._communicator is not None:
                self._communicator.abort(reason)
            self._changed.notify_all()
            self._interrupt.request(_EXITS.get(how, Stopped))

    def nudge(self) -> None:
        """Interrupt the user's code if this rank is to end and it is safe now. Call it again."""
        self._interrupt.nudge()

    def beat(self) -> Beat:
        """Return what the next heartbeat should say. Any thread may call it."""
        at = self._communicator
        waits = self._parked or (at is not None and at.waiting)
        progress = (self.moves << 32) + (self.generation << 20) + (at.completed if at else 0)
        return Beat(self.spec.start, progress & (2**62 - 1), waits, self.version)

    # -- orders to end ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def user_code(self) -> Iterator[None]:
        """Let an order to end reach what runs in a ``with`` block, wherever it is in Python."""
        with self._interrupt.reachable():
            with self._changed:
                self._obey()
            yield

    def _obey(self) -> None:
        """Raise what this rank was told to end with, unless that has to wait."""
        if self._end is not None:
            how, reason = self._end
            if how != "leave" or not self._member:
                self._interrupt.drop()
                raise _EXITS.get(how, Stopped)(reason)

    # -- generations -----------------------------------------------------------------------------

    def next_loop(self) -> int:
        """Count an elastic loop and return its number, from 1."""
        self._loops += 1
        return self._loops

    def form(self, loop: int, *, failed: bool = False, detail: str = "") -> Plan:
        """Leave the present generation and become a member of the next.

        Parameters
        ----------
        loop : int
            Which elastic loop the rank is about to enter; 0 outside one.
        failed : bool, default False
            Whether the generation is left because an operation failed.
        detail : str, optional
            What failed.

        Raises
        ------
        RankExit
            This rank ends instead.
        """
        self._drop_communicator()
        if self._store is None:
            self._store = store = self._means.open_store(self.spec.bind, self.secret)
            terms = self.spec.alone(store.address, self.secret)
            self.room = prepare(self.spec, terms, self._means, self.warm_up)
        while True:
            plan = self._await_plan(loop, failed, detail)
            try:
                self._connect(plan)
                self._doubts.clear()
                return plan
            except CollectiveError as error:
                self._drop_communicator()
                self._doubts.raise_for(plan, self.spec.start)
                failed, detail = True, str(error)

    def _await_plan(self, loop: int, failed: bool, detail: str) -> Plan:
        assert self._store is not None
        with self._changed:
            self._member = False
            reported = -1
            while True:
                self._obey()
                plan, self._next_plan = self._next_plan, None
                if plan is not None and reported >= 0:
                    self.phases.note("planned")
                    return plan
                if self._heard != reported:
                    reported = self._heard
                    self.port.report(
                        RankReady(
                            start=self.spec.start,
                            left=reported,
                            version=self.version + 0.5 * self.ahead,
                            loop=loop,
                            store=self._store.address,
                            failed=failed,
                            detail=detail,
                            unreached=self._doubts.unreached,
                            gone=self._doubts.gone,
                        )
                    )
                    self.phases.note("ready")
                self._changed.wait()

    def _connect(self, plan: Plan) -> None:
        terms = self.spec.rendezvous(plan, self.secret)
        meet = connect if terms.size == 1 else self._means.connect  # alone there is nobody to meet
        communicator = meet(terms)
        with self._changed:
            self._communicator = communicator
            self.plan, self.generation, self.source = plan, plan.generation, plan.source
            if self._aborted >= plan.generation:
                raise CollectiveError(f"generation {plan.generation} is over")
            self._obey()
            self._member = True
        chosen = self._communicator = communicator.connect()  # an abort of the first reaches it
        self.phases.note("connected")
        self._carried = None
        self._take_place(place_of([member.slot for member in plan.members], terms.rank))
        self.moves += 1
        self.port.report(RankFormed(self.spec.start, plan.generation, chosen.name, chosen.remark))

    def _drop_communicator(self) -> None:
        with self._changed:
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._doubts.note_gone(self.plan, communicator.gone)
            communicator.close()

    def _take_place(self, place: Place) -> None:
        for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
            setattr(self, name, getattr(place, name))

    def synchronized(self, plan: Plan) -> None:
        """Note that this rank has the state of the generation."""
        self.version = max(math.ceil(plan.version), 0)
        self.ahead = False
        self.room = None
        self.phases.note("synchronised")
        self.moves += 1

    def finish_loop(self) -> None:
        """Wait until all members have left their elastic loop.

        Raises
        ------
        CollectiveError
            A member failed before: all go back to their last commit.
        """
        generation = self.generation
        with self._changed:
            self._parked = True
            self.port.report(LoopDone(self.spec.start, generation, self.version))
            try:
                while self._released < generation:
                    if not self._member:
                        raise CollectiveError("a member failed before all had left the loop")
                    self._obey()
                    self._changed.wait()
            finally:
                self._parked = False

    def close(self) -> None:
        """Let go of everything. The rank's last act."""
        self._drop_communicator()
        if self._store is not None:
            self._store.close()
            self._store = None

    # -- Context ---------------------------------------------------------------------------------

    def communicator(self) -> Communicator:
        """Return the communicator of the present generation; form the first if there is none."""
        self.about_to_exchange()
        with self._changed:
            self._obey()
            communicator = self._communicator
        if communicator is None:
            self.form(loop=0)
            communicator = self._communicator
            assert communicator is not None
        return communicator

    def change_flag(self) -> bool:
        """Return whether this rank has heard of a change to its generation."""
        return self._noticed >= self.generation or self._end is not None

    def agree(self, changed: bool) -> None:
        """Note the flag that came out of a reduction over all ranks."""
        self._carried = changed or bool(self._carried)

    def committed(self) -> None:
        """Count a commit."""
        self.version += 1
        self.ahead = False

    def check_membership(self) -> None:
        """Leave the generation here if all ranks have agreed to; see :class:`Context`."""
        if self._end is not None or not self._member:  # what changes later is for the next check
            with self._changed:
                self._obey()
                if self.generation == 0:
                    return
                if not self._member:
                    raise CollectiveError(f"generation {self.generation} is over")
        if self.phases.under_way:
            words = self.phases.end()
            if self.rank == 0:  # once for all members
                self.port.report(RankNote(self.spec.start, about="phases", detail=words))
        changed, self._carried = self._carried, None
        if self._ask_all() if changed is None else changed:
            raise HostsUpdatedInterrupt

    def _ask_all(self) -> bool:
        return one_of_all(self, self.change_flag())
