"""Session of a rank: its membership in the generations of its job.

The rank's thread runs the user's function and all methods but ``on_…`` and ``beat``. The agent's
thread, an event loop, delivers messages through ``on_…``. These never block: they record the
message under the one lock, wake the rank's thread, and abort its communicator if its generation is
over. See :class:`Session` for the states that a rank can be in.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

from nbelastic import messages as m
from nbelastic.collectives import Communicator, RendezvousServer, connect
from nbelastic.elastic.ranks.context import Context, one_of_all, when_formed
from nbelastic.elastic.ranks.runtime import (
    DEFAULT_RUNTIME,
    DriverPort,
    RankRuntime,
    RankSpec,
    UnreachablePeers,
)
from nbelastic.elastic.ranks.telemetry import ResetTimings, user_line
from nbelastic.elastic.state.state_payload import ReceiveBuffer
from nbelastic.errors import (
    CollectiveError,
    Evicted,
    HostsUpdatedInterrupt,
    Leaving,
    NotTheRank,
    RankExit,
    Stopped,
)
from nbelastic.membership import places_of

_EXITS: dict[str, type[RankExit]] = {"leave": Leaving, "evict": Evicted}


class Session(Context):
    """Rank of a job; made, used and closed in the thread that runs the user's function.

    ============  ==============================================================================
    outside       setting up, or done with a generation; has reported nothing, or that it left
    waiting       has reported ready(left = newest known generation), waits for a later plan
    forming       has taken a plan, connects; an abort of that generation ends it
    member        has reported formed; trains. The generation ends by an abort or at an agreed step
    parked        its elastic loop has returned; waits until all have, or for an abort
    ============  ==============================================================================

    Messages may be late. ``_known`` is the newest generation that a plan or an abort has named.
    Older ones change nothing, and after an abort that overtakes its plan the rank reports ready
    again. An order to end is final. The rank obeys where it waits, at its next call, or in user
    code by an exception that is raised where it stands (:class:`.runtime.Interrupt`).
    """

    def __init__(
        self, spec: RankSpec, port: DriverPort, runtime: RankRuntime = DEFAULT_RUNTIME
    ) -> None:
        self.spec = spec
        self.port = port
        self._runtime = runtime
        self.secret = b""  # the job's, which comes with the function before any of it runs
        super().__init__()
        self.timings = ResetTimings()
        self._interrupt = runtime.interrupt()
        self._changed = runtime.condition()
        self._process = os.getpid()
        self._store: RendezvousServer | None = None
        self._communicator = None
        self._connected: Communicator | None = None  # the same, when it is
        self._forming = threading.RLock()  # held by the thread that forms a generation
        self._background: threading.Thread | None = None  # that forms the first for others
        self._known = self._aborted = self._released = self._ending = 0
        self._next_plan: m.Plan | None = None
        self._end: tuple[str, str] | None = None
        self._member = self._parked = self._has_formed = False
        self._agreed: bool | None = None
        self._unreachable = UnreachablePeers(runtime.probe)
        self.loops = self.moves = self._left = 0
        self._redone = (0, 0)
        self._first_starts: list[int] = []
        self._exchanges_before: int | None = None
        self.plan: m.Plan | None = None
        self.version = m.FRESH
        self.generation = self.source = 0
        self.max_np = spec.max_np
        self._take_place(spec.place)

    # -- what the agent delivers ---------------------------------------------------------------

    def on_plan(self, plan: m.Plan) -> None:
        """Receive a plan that names this rank."""
        with self._changed:
            if plan.generation > self._known:
                self._known = plan.generation
                self._next_plan = plan
                self._changed.notify_all()

    def on_abort(self, generation: int, reason: str) -> None:
        """Receive the end of a generation."""
        with self._changed:
            self._known = max(self._known, generation)
            self._aborted = max(self._aborted, generation)
            if self._next_plan is not None and self._next_plan.generation <= generation:
                self._next_plan = None
            if self.generation <= generation and self._communicator is not None:
                self.timings.begin()
                self._communicator.abort(reason)
            self._member = self._member and self.generation > generation
            self._changed.notify_all()

    def on_notice(self, generation: int) -> None:
        """Receive the notice that the membership of a generation is about to change.

        Before the first it says that other ranks wait for it, for a group that this one need not
        be in. It forms in the background then, until this rank begins something itself.
        """
        with self._changed:
            self._ending = max(self._ending, generation)
            if generation or self._background or self._has_formed or self.loops:
                return
            self._background = threading.Thread(
                target=self._form_for_others, name="nbelastic-forming", daemon=True
            )
            self._background.start()

    def on_release(self, generation: int) -> None:
        """Receive the release of a generation: all members have left their elastic loop."""
        with self._changed:
            self._released = max(self._released, generation)
            self._changed.notify_all()

    def on_end(self, how: str, reason: str, save: float = 0.0) -> None:
        """Receive the order to end; the first one other than ``leave`` is final.

        With `save`, no other rank has the state, and there are so many seconds to write it.
        """
        with self._changed:
            self.time_to_save = max(self.time_to_save, save)
            if self._end is not None and self._end[0] != "leave":
                return
            self._end = (how, reason)
            if how == "leave" and self._member:
                return  # at the step that all members agree on
            if self._communicator is not None:
                self._communicator.abort(reason)
            self._changed.notify_all()
            self._interrupt.request(_EXITS.get(how, Stopped))

    @property
    def ordered_to_end(self) -> bool:
        """Whether this rank was ordered to end."""
        return self._end is not None

    def nudge(self) -> None:
        """Interrupt the user's code if this rank is to end, where safe. Call this repeatedly."""
        self._interrupt.nudge()

    def beat(self) -> m.Beat:
        """Return the next heartbeat. Any thread may call it."""
        generation, at = self.generation, self._communicator
        waits = self._parked or (at is not None and at.waiting)
        progress = (self.moves << 32) + (generation << 20) + (at.completed if at else 0)
        progress &= 2**62 - 1
        doing = at.current_operation if waits and at is not None else ""
        operations = self._operations()
        return m.Beat(self.spec.start, generation, progress, waits, self.version, operations, doing)

    def _operations(self) -> int:
        """Return the number of operations that the loop has begun in this generation."""
        before = self._exchanges_before
        return 0 if before is None else self.exchanges - before

    def _check_process(self) -> None:
        """Refuse to run in a fork of the rank's process, which has no agent.

        Called before any lock is taken: in a fork, a lock that another thread held is never
        released.
        """
        if os.getpid() != self._process:
            raise NotTheRank(
                f"this process ({os.getpid()}) was forked from rank {self.rank} (process "
                f"{self._process}); only the rank itself commits and takes part in operations"
            )

    # -- orders to end ---------------------------------------------------------------------------

    def user_code(self) -> AbstractContextManager[None]:
        """Let an order to end interrupt the code in a ``with`` block."""
        with self._changed:
            self._obey()  # an order that comes after this reaches the block with a later nudge
        reachable: AbstractContextManager[None] = self._interrupt.reachable()
        return reachable

    def _obey(self) -> None:
        """Raise the exception of an order to end, unless it has to wait for a commit."""
        if self._end is not None:
            how, reason = self._end
            if how != "leave" or not self._member:
                if threading.current_thread() is not self._background:
                    self._interrupt.drop()
                raise _EXITS.get(how, Stopped)(reason)

    # -- generations -----------------------------------------------------------------------------

    def next_loop(self) -> int:
        """Count an elastic loop and return its number, from 1."""
        self.loops += 1
        return self.loops

    def form(
        self,
        loop: int,
        step_bytes: Callable[[], int] = lambda: 0,
        failure: str | None = None,
        *,
        part: bool = False,
    ) -> m.Plan:
        """Leave the present generation and become a member of the next.

        `loop` is the number of the elastic loop that the rank is about to enter; 0 outside one.
        `step_bytes` returns the memory that its first step takes.
        `failure` is the error of an operation that failed.
        For an operation of a `part` of the ranks, the others need not begin one.
        """
        self._check_process()
        if loop and self._background is not None:
            with self._changed:
                self._changed.notify_all()  # it makes room
        with self._forming:
            own = failure is not None and self._works()
            self._drop_communicator()
            if self._store is None:
                self._store = self._runtime.open_store(self.spec.bind, self.secret)
                self._warm_up(self._store, step_bytes)
            while True:
                plan = self._await_plan(loop, failure, own, part)
                try:
                    self._connect(plan)
                    self._unreachable.clear()
                    return plan
                except CollectiveError as error:
                    self._drop_communicator()
                    self._unreachable.record_failure(plan, self.spec.start)
                    failure, own = str(error), False

    def _warm_up(self, store: RendezvousServer, step_bytes: Callable[[], int]) -> None:
        """Prepare to join ranks that train, or to be joined where this one trains alone."""
        spec, nbytes = self.spec, self.spec.state_bytes
        self._runtime.on_set_up(step_bytes() if nbytes else 0)
        self.receive_buffer = ReceiveBuffer.for_state(nbytes) if nbytes else None
        if nbytes is not None or spec.place.size == 1:
            self._runtime.form_alone(spec, store.address, self.secret)

    def _works(self) -> bool:
        """Return whether the communicator works, so that neither a peer nor the network failed."""
        with self._changed:
            if self._communicator is None or not self._member:
                return False
            try:
                self._communicator.check()
            except CollectiveError:
                return False
            return not self._communicator.dead_ranks

    def _await_plan(self, loop: int, failure: str | None, own: bool, part: bool) -> m.Plan:
        assert self._store is not None
        line = user_line(threading.get_ident())
        with self._changed:
            self._member = False
            reported = -1
            while True:
                self._obey()
                plan, self._next_plan = self._next_plan, None
                if plan is not None and reported >= 0:
                    self.timings.mark("planned")
                    return plan
                if self._known != reported:
                    reported = self._known
                    self.port.report(
                        m.RankReady(
                            start=self.spec.start,
                            left=reported,
                            version=self.version + 0.5 * self.ahead,
                            loop=loop,
                            store=self._store.address,
                            failed=failure is not None,
                            detail=failure or "",
                            unreached=self._unreachable.unreached,
                            gone=self._unreachable.gone,
                            own=own,
                            part=part,
                            line=line,
                        )
                    )
                    self.timings.mark("ready")
                if self.loops and threading.current_thread() is self._background:
                    raise CollectiveError("this rank has entered its loop meanwhile")
                self._changed.wait()

    def _connect(self, plan: m.Plan) -> None:
        terms = self.spec.rendezvous(plan, self.secret)
        meet = connect if terms.size == 1 else self._runtime.connect  # a lone rank has no peers
        communicator = meet(terms)
        with self._changed:
            self._communicator = communicator
            # Without a loop, operations count from the start of the function.
            self._exchanges_before = 0 if plan.loop == 0 else None  # before what `beat` reads first
            self.plan, self.generation, self.source = plan, plan.generation, plan.source
            if self._aborted >= plan.generation:
                raise CollectiveError(f"generation {plan.generation} is over")
            self._obey()
            self._member = True
        chosen = self._communicator = communicator.connect()  # an abort of the first reaches it
        if self._has_formed:
            self._older = weakref.WeakSet(threading.enumerate())
        elif plan.version == m.FRESH:
            self._first_starts = self.starts()
        self._connected, self._has_formed = chosen, True
        self.timings.mark("connected")
        self._agreed = None
        self._take_place(places_of([member.slot for member in plan.members])[terms.rank])
        self.moves += 1
        for tell in when_formed:
            tell(chosen)
        for call in self.after_forming:
            call()
        self.port.report(
            m.RankFormed(self.spec.start, plan.generation, chosen.name, chosen.fallback_reason)
        )

    def _drop_communicator(self) -> None:
        with self._changed:
            communicator, self._communicator, self._connected = self._communicator, None, None
        if communicator is not None:
            self._unreachable.record_exits(self.plan, communicator.dead_ranks)
            communicator.close()

    def _take_place(self, place: m.Place) -> None:
        for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
            setattr(self, name, getattr(place, name))

    def synchronized(self, plan: m.Plan, commits: int = 0) -> None:
        """Record that this rank has the state of the generation, perhaps a checkpoint's."""
        self.version = max(math.ceil(plan.version), commits)
        self.ahead = False
        self.receive_buffer = None
        self.telemetry.nothing_to_redo()
        self._exchanges_before = self.exchanges
        self.timings.mark("synchronised")
        self.moves += 1

    def finish_loop(self) -> None:
        """Wait until all members have left their elastic loop.

        If a member fails before, all go back to their last commit.
        """
        self._check_process()
        generation = self.generation
        with self._changed:
            self._parked = True
            self.port.report(
                m.LoopDone(self.spec.start, generation, self.version, self._operations())
            )
            try:
                while self._released < generation:
                    if not self._member:
                        raise CollectiveError("a member failed before all had left the loop")
                    self._obey()
                    self._changed.wait()
            finally:
                self._parked = False

    def close(self) -> None:
        """Release everything, as the last call of the rank."""
        self._drop_communicator()
        if self._store is not None:
            self._store.close()
            self._store = None

    # -- Context ---------------------------------------------------------------------------------

    def communicator(self) -> Communicator:
        self._check_process()
        self.about_to_exchange()
        with self._changed:
            self._obey()
            communicator = self._connected
        return communicator or self._first()

    def _first(self, *, part: bool = False) -> Communicator:
        """Form the first generation, outside of a loop, unless another thread does."""
        with self._forming:
            if self._connected is None:
                self.form(0, part=part)
            assert self._connected is not None
            return self._connected

    def _form_for_others(self) -> None:
        with contextlib.suppress(CollectiveError, RankExit):  # the rank's thread sees both as well
            self._first()

    def complete_groups(self) -> None:
        """Form the first generation before this rank returns, if it has made groups of ranks."""
        if self.groups_made and not self._has_formed and not self.loops:
            self._first()

    def formed(self) -> Communicator:
        if not self._has_formed:
            self._check_process()
            self._first(part=True)
        return super().formed()

    def _formed_elsewhere(self) -> Communicator:
        self._check_process()
        thread = threading.current_thread()
        with self._forming:  # or wait until the rank's thread has formed the next generation
            if self._connected is None or self.is_older(thread):
                raise CollectiveError(
                    f"thread {thread.name!r} is of an earlier generation, which is over; start it "
                    "in the elastic loop"
                )
            return self._connected

    def starts(self) -> list[int]:
        return [] if self.plan is None else [member.start for member in self.plan.members]

    def first_starts(self) -> list[int]:
        return self._first_starts

    def change_flag(self) -> bool:
        return self._ending >= self.generation or self._end is not None

    def agree(self, changed: bool) -> None:
        self._agreed = changed or bool(self._agreed)

    def committed(self) -> None:
        self._check_process()
        super().committed()
        self.telemetry.nothing_to_redo(made=True)

    def restored(self) -> None:
        """Record that the state is back at its last commit."""
        self._redone = self.telemetry.uncommitted()
        self.timings.mark("restored")

    def check_membership(self) -> None:
        self._check_process()
        if self._end is not None or not self._member:  # later changes wait for the next check
            with self._changed:
                self._obey()
                if self.generation == 0:
                    return
                if not self._member:
                    raise CollectiveError(f"generation {self.generation} is over")
        if self.timings.in_progress:
            figures = self.timings.end()
            redone, self._redone = self._redone, (0, 0)
            if self.telemetry.observer is not None:
                self.telemetry.observer.redone(*redone)
            if self.rank == 0:  # one report for all members
                figures.update(zip(("batches", "samples"), redone, strict=True))
                self.port.report(m.RankNote(self.spec.start, "phases", "", figures))
        changed, self._agreed = self._agreed, None
        if self._ask_all() if changed is None else changed:
            self._left = self.generation
            raise HostsUpdatedInterrupt

    @property
    def leaves(self) -> bool:
        """Whether all ranks have agreed to leave the present generation at the last commit."""
        return self._left == self.generation

    def _ask_all(self) -> bool:
        return one_of_all(self, self.change_flag())


def warn(context: Context, detail: str) -> None:
    """Add a warning to the history of a rank's job; outside a job, do nothing.

    `detail` has the problem on its first line, and on further lines the cause and what to do. The
    history shows equal warnings of several ranks once.
    """
    note(context, "warning", detail)


def note(context: Context, about: str, detail: str) -> None:
    """Add an entry of the kind `about` to the history of a rank's job; outside, do nothing."""
    if isinstance(context, Session):
        context.port.report(m.RankNote(context.spec.start, about, detail))
