"""Jobs whose ranks are threads of this process, with real transports, and faults on order.

The machine that decides, sessions, elastic loop, state, loader and sums are the real ones, and so
are sockets and shared memory. A thread stands for a worker's process: a kill breaks its
communicator, and nothing that it does afterwards reaches anybody.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import activate
from nbelastic.elastic.ranks.runtime import RankRuntime, RankSpec
from nbelastic.elastic.ranks.session import Session
from nbelastic.errors import CollectiveError, RanksDisagree
from nbelastic.errors import RankExit as Ordered
from nbelastic.membership import Machine
from nbelastic.messages import (
    Beats,
    Limits,
    Notify,
    RankLeft,
    RankRaised,
    RankReturned,
    Slot,
    SlotGone,
    SlotLeaving,
    SlotsFound,
    SlotSilent,
    Tick,
)
from tests.support.exact_training import EPOCHS, STEPS, ExactTraining, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.collectives import Communicator, Rendezvous
    from nbelastic.messages import Effect, Event, Outcome, StartRank

PATIENCE_S = 60.0
"""Longer than a storm takes on a machine with much else to do."""

BEAT_S = 0.02
KINDS = ("kill", "kill", "kill in a sum", "leave", "join", "stop", "cut", "cut")


@dataclass(frozen=True)
class Blow:
    """A fault: what happens to which rank, between its gradients and its update of a step."""

    step: int
    kind: str
    which: int


def blows_of(seed: int, steps_of_all: int = STEPS) -> list[Blow]:
    """Return the faults of a storm, at different steps."""
    dice = random.Random(seed)
    steps = dice.sample(range(steps_of_all), dice.randint(2, 4))
    kinds = dice.sample(KINDS, len(steps))
    return [
        Blow(step, kind, dice.randrange(4)) for step, kind in zip(sorted(steps), kinds, strict=True)
    ]


class Killed(BaseException):
    """Ends the thread of a rank whose process was killed."""


class Storm:
    """A job, and the faults that befall it.

    Parameters
    ----------
    blows : list of Blow
        The faults.
    size : int
        How many ranks there are at first.
    connect : callable
        Makes communicators.
    make_training : callable, optional
        Returns what a start trains, by its number and the ledger.
    """

    def __init__(
        self,
        blows: list[Blow],
        size: int,
        connect: Callable[[Rendezvous], Communicator],
        make_training: Callable[[int, Ledger], ExactTraining] | None = None,
    ) -> None:
        self.ledger: Ledger = {}
        self.make_training = make_training or (
            lambda _, ledger: ExactTraining(ledger, random=False)
        )
        self.backends: set[str] = set()
        self.generations = 0
        self._blows = list(blows)
        self._size = size
        self._runtime = RankRuntime(connect=connect)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        limits = Limits(
            np=size,
            forming_timeout=PATIENCE_S,
            stall_timeout=PATIENCE_S,
            ending_timeout=PATIENCE_S,
            cooldown=(0.001, 0.002),
        )
        self._machine = Machine(limits)
        self._ranks: dict[int, _Rank] = {}
        self._hosts = 0
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self._notified = 0
        self._outcome: Outcome | None = None

    def run(self) -> list[Any]:
        """Let the job run to its end; return what its ranks have returned."""
        try:
            for _ in range(self._size):
                self.hire()
            while self._outcome is None:
                assert time.monotonic() < self._began + PATIENCE_S, (
                    f"no end: {self._machine.roster}"
                )
                try:
                    event = self._events.get(timeout=BEAT_S)
                except queue.Empty:
                    event = Beats(tuple(r.session.beat() for r in self._ranks.values() if r.lives))
                    self._handle(Tick())
                self._handle(event)
            assert self._outcome.kind == "finished", self._outcome
            return [self._ranks[start].result for start in self._outcome.starts]
        finally:
            for rank in self._ranks.values():
                rank.kill("the storm is over")
            for rank in self._ranks.values():
                rank.thread.join(PATIENCE_S)
                assert not rank.thread.is_alive(), f"start {rank.start} has not ended"

    def hire(self) -> None:
        """Have a worker with a free slot come."""
        self._hosts += 1
        name = f"worker-{self._hosts}"
        self.tell(SlotsFound((Slot(name, f"tcp://{name}", name, f"host-{self._hosts}"),)))

    def tell(self, event: Event) -> None:
        """Send an event to the machine. Any thread may call it."""
        self._events.put(event)

    def _handle(self, event: Event) -> None:
        now = time.monotonic() - self._began
        for effect in self._machine.handle(event, now, 0.5):
            getattr(self, f"_do_{type(effect).__name__}")(effect)

    # -- effects -------------------------------------------------------------------------------

    def _do_StartRank(self, effect: StartRank) -> None:
        self._ranks[effect.start] = _Rank(self, effect, self._runtime)

    def _do_Publish(self, effect: Any) -> None:
        self.generations += 1
        for member in effect.plan.members:
            self._ranks[member.start].session.on_plan(effect.plan)

    def _do_Abort(self, effect: Any) -> None:
        for start in effect.starts:
            self._ranks[start].session.on_abort(effect.generation, str(effect.reason))
        with self._changed:
            self._changed.notify_all()

    def _do_Notify(self, effect: Notify) -> None:
        for start in effect.starts:
            self._ranks[start].session.on_notice(effect.generation)
        with self._changed:
            self._notified = effect.generation
            self._changed.notify_all()

    def _do_Release(self, effect: Any) -> None:
        for start in effect.starts:
            self._ranks[start].session.on_release(effect.generation)

    def _do_SaveCommit(self, effect: Any) -> None:
        self._ranks[effect.start].session.on_save()

    def _do_EndRank(self, effect: Any) -> None:
        rank = self._ranks[effect.start]
        rank.session.on_end(effect.how, str(effect.reason))
        rank.told_to_end.set()

    def _do_RestartWorker(self, effect: Any) -> None:
        self.tell(SlotGone(effect.slot.id))

    def _do_Record(self, effect: Effect) -> None:
        """History is for people."""

    def _do_End(self, effect: Any) -> None:
        self._outcome = effect.outcome

    # -- faults --------------------------------------------------------------------------------

    def strike(self, rank: _Rank, step: int) -> None:
        """Let those faults happen that are due on a rank, in its thread."""
        session = rank.session
        due = []
        with self._changed:
            for blow in list(self._blows):
                if blow.step <= step and blow.which % session.size == session.rank:
                    self._blows.remove(blow)
                    due.append(blow)
        for blow in due:
            getattr(self, f"_{blow.kind.replace(' ', '_')}")(rank)

    def _kill(self, rank: _Rank) -> None:
        rank.kill("its process is killed")
        self.hire()
        self.tell(SlotGone(rank.slot.id))
        raise Killed

    def _kill_in_a_sum(self, rank: _Rank) -> None:
        communicator = rank.communicator
        if communicator.size == 1:
            self._kill(rank)
        begin = communicator.allreduce_tree_async

        def begin_and_die(*args: Any) -> Any:
            begin(*args)
            self._kill(rank)

        communicator.allreduce_tree_async = begin_and_die  # type: ignore[method-assign]
        communicator.allreduce_tree = begin_and_die  # type: ignore[method-assign]

    def _leave(self, rank: _Rank) -> None:
        self.hire()  # else the last rank would stay until there is another
        self.tell(SlotLeaving(rank.slot.id))
        self._await_notice(rank)

    def _join(self, rank: _Rank) -> None:
        self.hire()
        self._await_notice(rank)

    def _await_notice(self, rank: _Rank) -> None:
        """Wait until the members of the generation are notified of the change, or it is over."""
        generation = rank.session.generation
        with self._changed:
            noticed = self._changed.wait_for(
                lambda: self._notified >= generation or not rank.session._member, PATIENCE_S
            )
        assert noticed, f"generation {generation} is not notified"

    def _stop(self, rank: _Rank) -> None:
        """Freeze until the others have gone on without this rank."""
        self.hire()
        self.tell(SlotSilent(rank.slot.id))
        assert rank.told_to_end.wait(PATIENCE_S), "a frozen rank is not evicted"

    def _cut(self, rank: _Rank) -> None:
        communicator: Any = rank.communicator
        if not communicator.cut_connections():
            communicator.abort("its connections are cut")  # there are none through shared memory


class _Rank:
    """A start of the function, in a thread."""

    def __init__(self, storm: Storm, effect: StartRank, runtime: RankRuntime) -> None:
        self.start, self.slot, self._place = effect.start, effect.slot, effect.place
        self.session: Session
        self.told_to_end = threading.Event()
        self.result: Any = None
        self._storm, self._runtime = storm, runtime
        self._killed = False
        self._made = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"start-{self.start}")
        self.thread.start()
        assert self._made.wait(PATIENCE_S), "the rank's thread has not begun"

    @property
    def communicator(self) -> Communicator:
        """That of the present generation; `session.communicator()` would count as an operation."""
        found = self.session._communicator
        assert found is not None
        return found

    @property
    def lives(self) -> bool:
        return self.thread.is_alive() and not self._killed

    def report(self, event: Event) -> None:
        if self._killed:
            raise Killed
        self._storm.tell(event)

    def kill(self, reason: str) -> None:
        """End it, as far as others can see. Any thread may call it."""
        self._killed = True
        self.told_to_end.set()
        self.session.on_end("cancel", reason)

    def _run(self) -> None:
        spec = RankSpec(
            job="storm",
            start=self.start,
            place=self._place,
            bind="127.0.0.1",
            operation_timeout_s=PATIENCE_S,
        )
        self.session = session = Session(spec, self, self._runtime)
        self._made.set()
        event: Event
        try:
            with activate(session):
                try:
                    self.result = self._train()
                    event = RankReturned(self.start)
                except Ordered:
                    event = RankLeft(self.start)
                except Exception as error:
                    disagree = isinstance(error, RanksDisagree)
                    event = RankRaised(
                        self.start,
                        repr(error),
                        collective=isinstance(error, CollectiveError) and not disagree,
                        version=session.version,
                        on_all_ranks=disagree,
                    )
                finally:
                    session.close()
                self.report(event)
        except Killed:
            pass

    def _train(self) -> tuple[int, str]:
        training = self._storm.make_training(self.start, self._storm.ledger)
        _loop(training.state, training, self)
        return training.state.steps, training.digest()

    def before_update(self, step: int) -> None:
        self._storm.backends.add(self.communicator.name)
        self._storm.strike(self, step)


@hvd.elastic.run
def _loop(state: Any, training: ExactTraining, rank: _Rank) -> None:
    for state.epoch in range(state.epoch, EPOCHS):
        for step in training.loader:
            training.backward(step)
            rank.before_update(state.steps)
            training.update()
            state.commit()
