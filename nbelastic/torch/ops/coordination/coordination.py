"""Coordination of named operations, and of ranks that have joined.

Each rank of a generation has a thread that listens to the matching of operations
(:mod:`nbelastic.collectives.rendezvous.matcher`). It starts with the rank's first operation and
sleeps.

*Names.* A rank offers a named operation. When all have, each thread launches it, over a
communicator for these operations, in the order in which the matching has decided. So the order in
which ranks begin named operations does not matter. Operations without a name never come here.

*Comparison.* Where records of a comparison could meet another operation, ranks compare by the
matching what they have not foreseen (:mod:`nbelastic.collectives.consistency`). A rank that has
begun the foreseen operation answers for it, here.

*Join.* Operations without a name, and steps of optimizers, are numbered on each rank. A rank that
joins tells its number. From then on the threads of the other ranks tell what they are in, also if
they had begun before. The joined rank takes part in that, with zeros.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from nbelastic.collectives import Communicator
from nbelastic.collectives.communicator import apart
from nbelastic.collectives.consistency import disagreement, listed
from nbelastic.elastic.ranks.context import is_ranks_thread, when_formed
from nbelastic.errors import CollectiveError, NotTheRank, RanksDisagree
from nbelastic.torch.ops.operation.tensor_operations import (
    Allreduce,
    Pending,
    TensorOperation,
    Waitable,
    in_words,
)

if TYPE_CHECKING:
    from nbelastic.collectives.rendezvous.client import RendezvousClient
    from nbelastic.elastic.ranks.groups import Group

T = TypeVar("T")
Message = dict[str, Any]

# What a rank that has joined says it is about to do, in an operation that it cannot take part in.
JOINED = "join()"

# What a rank announces before ranks compare whether a change of members is due.
CHECK: Message = {"kind": "check"}

MOST_PENDING = 10_000  # named operations of a rank that can wait for other ranks at a time

# Numbered operations that a rank can tell of later. None ends before all ranks take part.
KEPT = 64

_POLL_S = 0.0005
_TELL_AFTER_S = 1.0
_TELL_EVERY_S = 0.5


@dataclass(eq=False)
class Comparison:
    """What this rank compares, until all ranks have said theirs, or the matching has ended."""

    members: Sequence[int]
    ended: threading.Event = field(default_factory=threading.Event)
    decision: Message | None = None


# An operation that is launched when its comparison has ended; it keeps its own error.
Deferred = tuple[Communicator, Comparison | None, Callable[[], None]]


@dataclass(eq=False)
class _Named:
    """A named operation of this rank, until it has ended."""

    coordination: Coordination
    key: str
    members: list[int]
    name: str
    operation: TensorOperation[Any]
    ended: threading.Event = field(default_factory=threading.Event)
    launched: bool = False
    error: Exception | None = None

    def done(self) -> bool:
        """Return whether it has ended."""
        return self.ended.is_set()

    def wait(self) -> None:
        """Wait for its end."""
        self.coordination.await_named(self)
        if self.error is not None:
            raise self.error


class Coordination:
    """Named operations of a rank, and its knowledge of joined ranks."""

    def __init__(self, communicator: Communicator, client: RendezvousClient) -> None:
        self._communicator = weakref.ref(communicator)  # else the weak table would keep it forever
        self._client = client  # not yet connected
        self._lock = threading.Lock()
        self.timeout_s = client.timeout_s  # of an operation
        self.number = 0  # of numbered operations that this rank has begun
        self._history: deque[tuple[int, Any]] = deque(maxlen=KEPT)
        self._tells = False
        self._comparing = ""  # what the rank's thread waits for in a comparison
        self._pending: dict[tuple[str, str], _Named] = {}
        # Apart, because a second thread that asks who is missing must not take a pong.
        self._answers: dict[str, SimpleQueue[Message | None]] = {
            kind: SimpleQueue() for kind in ("event", "missing", "pong")
        }
        self._reason: str | None = None
        self._gone: set[int] = set()
        self._parts: dict[str, weakref.ref[Communicator]] = {"": self._communicator}
        self._comparisons: dict[tuple[str, int], Comparison] = {}
        self._asked: dict[str, set[int]] = {}  # before there is such a part
        self._deferred: list[Deferred] = []
        self.joined = False
        communicator.on_abort(lambda *_: client.abort())  # the listener sleeps in receive()
        name = f"nbelastic-matching-{communicator.generation}-{communicator.rank}"
        # A daemon, because a rank that exits must not wait for its peers.
        threading.Thread(
            target=_listen, args=(weakref.ref(self), client), name=name, daemon=True
        ).start()

    @property
    def deferred(self) -> list[Deferred]:
        """Operations of the rank's thread that wait for their comparison."""
        return self._deferred if is_ranks_thread() else []

    # -- operations without a name ---------------------------------------------------------------

    def announce(self, what: Any) -> None:
        """Number this rank's next operation, and tell joined ranks of it."""
        with self._lock:
            self.number += 1  # under the lock, so that `_tell` sends each number once
            self._history.append((self.number, what))
            if self._tells and not self.joined:  # its peers tell of what it follows
                self._client.send({"do": "step", "number": self.number, "what": what})

    def join(self) -> None:
        """Tell all ranks that this rank has joined."""
        with self._lock:
            self.joined = True
            self._client.send({"do": "join", "done": self.number})  # others tell what came after

    def next_event(self) -> Message:
        """Wait for an operation of the others, or for the end of joining."""
        event = self._wait(lambda: self._next("event"))
        if event is None:
            if (communicator := self._communicator()) is not None:
                communicator.check()  # raises the abort's own reason, if there is one
            raise CollectiveError(self._reason or "the generation is over")
        return event

    # -- comparison ------------------------------------------------------------------------------

    def expect(
        self,
        communicator: Communicator,
        pattern: Any,
        number: int = 0,
        *,
        foresee: bool = True,
        for_good: bool = False,  # done unless ranks differ, which breaks the communicator then
    ) -> Comparison | None:
        """Begin to compare the ranks' next operations; None if all have foreseen it."""
        _, key, members = communicator.part_of or (None, "", [*range(communicator.size)])
        history = communicator.history
        if foresee and not communicator.capabilities.carries_descriptions:
            history.apart = True  # records could meet a foreseen operation's data over Gloo
        with self._lock:
            self._parts[key] = weakref.ref(communicator)
            history.asked |= self._asked.pop(key, set())
            place = key, history.number
            # What another rank asks about must be compared here too, even if foreseen.
            if foresee and place[1] not in history.asked and history.foresees(pattern):
                history.add(pattern)
                return None
            comparison = self._comparisons[place] = Comparison(members)
            if for_good:  # the rank begins more before this is decided
                history.add(pattern)
        text = in_words(pattern)
        communicator.current_operation = text.partition("\n")[0]
        if self._reason is not None:
            comparison.ended.set()
        elif gone := self._gone.intersection(members):  # it says nothing any more
            communicator.abort(
                f"rank {min(gone)} has left without {communicator.current_operation}"
            )
        else:
            self._say(place, members, text, number, begun=for_good)
        return comparison

    def compare(
        self,
        communicator: Communicator,
        pattern: Any,
        number: int = 0,
        limit_s: float = 0.0,
        *,
        foresee: bool = True,
    ) -> list[int]:
        """Compare the ranks' next operations; return the ranks' numbers, unless foreseen."""
        comparison = self.expect(communicator, pattern, number, foresee=foresee)
        if comparison is None:
            return []
        limit_s = limit_s or self.timeout_s
        end = time.monotonic() + limit_s
        communicator.waits_apart = True
        if is_ranks_thread():
            self._comparing = communicator.current_operation
        try:
            # Other ranks may need this one's deferred operations before they can compare.
            while not comparison.ended.wait(_POLL_S if self.deferred else limit_s):
                self.launch_deferred()
                if time.monotonic() > end:
                    what = communicator.current_operation or "an operation"
                    communicator.abort(f"not all ranks have begun {what} within {limit_s:g} s")
        finally:
            communicator.waits_apart = False
            if is_ranks_thread():
                self._comparing = ""
        decision = comparison.decision
        communicator.check()
        if decision is None:  # the rank with the matching has returned; those left do without
            return [] if foresee else communicator.compare(pattern, number)
        with self._lock:
            communicator.history.add(None if decision["texts"] is not None else pattern)
        if decision["texts"] is not None:
            raise _disagreement(decision)
        numbers: list[int] = decision["values"]
        return numbers

    def launch_deferred(self) -> None:
        """Launch operations that waited for their comparison, in order on each communicator."""
        waiting = []
        for each in list(self.deferred):
            communicator, comparison, launch = each
            ready = comparison is None or comparison.ended.is_set()
            if communicator in waiting or not ready:
                waiting.append(communicator)  # what is behind it keeps its order
            else:
                self.deferred.remove(each)
                launch()

    def _say(
        self, place: tuple[str, int], members: Sequence[int], text: str, value: int, *, begun: bool
    ) -> None:
        its = {"set": place[0], "number": place[1], "members": members}
        self._client.send({"do": "compare", **its, "text": text, "value": value, "begun": begun})

    def _on_asked(self, message: Message) -> None:
        """Answer for a begun operation; remember the question before the operation begins."""
        place = key, number = message["set"], message["number"]
        text: Any = ""
        with self._lock:
            part = self._parts.get(key)
            communicator = None if part is None else part()
            if communicator is None:
                self._asked.setdefault(key, set()).add(number)
                return
            history = communicator.history
            if number < history.number:
                text = "" if place in self._comparisons else history.at(number)
            elif place not in self._comparisons:
                history.asked.add(number)  # before reading `begins`: the rank does the reverse
                text = history.begins if number == history.number else ""
        if text:
            _, _, members = communicator.part_of or (None, "", [*range(communicator.size)])
            self._say(place, members, in_words(text), 0, begun=True)

    def _on_compared(self, message: Message) -> None:
        place = message["set"], message["number"]
        with self._lock:
            part = self._parts.get(place[0])
            communicator = (part and part()) or self._communicator()
            comparison = self._comparisons.pop(place, None)
            if communicator is not None:
                communicator.history.asked.discard(place[1])
        # A begun operation cannot be taken back, so the generation ends with it.
        if message["texts"] is not None and message["begun"] and communicator is not None:
            communicator.abort(str(_disagreement(message)), RanksDisagree)
        if comparison is not None:
            comparison.decision = message
            comparison.ended.set()

    # -- operations with a name ------------------------------------------------------------------

    def offer(self, group: Group, name: str, operation: TensorOperation[T]) -> Pending[T]:
        """Begin a named operation among the ranks of a group; it is launched when all have."""
        key, members = group.key, group.ranks
        with self._lock:
            if (key, name) in self._pending:
                raise ValueError(
                    f"duplicate name: {operation.verb} of name {name!r} was requested while "
                    "another operation with this name is being processed. Wait for it by "
                    "hvd.synchronize(), or use another name"
                )
            if len(self._pending) >= MOST_PENDING:
                raise ValueError(f"{MOST_PENDING} named operations wait for other ranks already")
            named = _Named(self, key, members, name, operation)
            self._pending[key, name] = named
        if self._reason is not None:  # read once it is pending, as `_fail` does the reverse
            self._fail(self._reason)
        # Copied now, in the rank's thread: the listening thread may launch it much later.
        operation.load_on(members.index(group.context.rank), len(members))
        its = {"set": key, "name": name, "members": members, "numbers": list(operation.numbers)}
        text = in_words(operation.pattern)
        self._client.send({"do": "offer", **its, "text": text, "spec": operation.spec})
        return Pending([named], operation.store)

    def flush(self) -> None:
        """Wait until all decisions on what was offered before have been carried out here."""
        if self._pending and self._reason is None:
            self._client.send({"do": "ping", "number": 0})  # its pong is behind all decisions
            self._wait(lambda: self._next("pong"))

    def await_named(self, named: _Named) -> None:
        """Wait for a named operation."""
        communicator = self._communicator()
        begun = time.monotonic()

        def wait() -> None:
            interval = _TELL_AFTER_S
            while not named.ended.wait(interval):
                interval = _TELL_EVERY_S
                if not named.launched:
                    its = {"set": named.key, "name": named.name, "begun": self.number}
                    self._client.send({"do": "blocked", **its})
                text = in_words(named.operation.pattern)
                if gone := self._gone.intersection(named.members):
                    self.over(f"rank {min(gone)} has left without {text}")
                if time.monotonic() - begun > self.timeout_s and not named.launched:
                    self._client.send({"do": "missing", "set": named.key, "name": named.name})
                    ranks = (self._next("missing") or {}).get("ranks")
                    if communicator is not None and ranks:  # none, if they have begun it meanwhile
                        communicator.abort(
                            f"{text.partition(chr(10))[0]} was not begun by ranks {ranks} "
                            f"within {self.timeout_s:g} s"
                        )

        if not named.ended.is_set():
            self._wait(wait)

    def _wait(self, wait: Callable[[], T]) -> T:
        """Wait, as heartbeats see."""
        communicator = self._communicator()
        if communicator is None or not is_ranks_thread():
            return wait()
        # Which operation it is says nothing about the operations of all ranks.
        communicator.current_operation, communicator.waits_apart = "", True
        try:
            return wait()
        finally:
            communicator.waits_apart = False

    # -- in the listening thread -----------------------------------------------------------------

    def handle(self, message: Message) -> None:
        """Handle a message of the matching."""
        kind = message["do"]
        if kind == "asked":
            self._on_asked(message)
        elif kind == "compared":
            self._on_compared(message)
        elif kind == "join":
            self._tell(message["done"])
        elif kind == "step":
            self._answers["event"].put(message)
        elif kind == "together":
            with self._lock:
                self._tells = False
                was_joined, self.joined = self.joined, False
            if was_joined:
                self._answers["event"].put(message)
        elif kind == "gone":
            self._gone.add(message["rank"])  # first: `expect` adds its comparison, then reads this
            if any(message["rank"] in each.members for each in [*self._comparisons.values()]):
                what = self._comparing or "an operation"
                self.over(f"rank {message['rank']} has left without {what}")
            elif self.joined:
                self.over(f"rank {message['rank']} has left while this rank had joined")
        elif kind in ("pong", "missing"):
            self._answers[kind].put(message)
        elif kind == "stuck":
            self._end_stuck(message)
        elif kind == "ask":
            self._client.send({"do": "waits", **self._position()})

    def launch_all(self, decisions: Sequence[Message]) -> None:
        """Launch operations begun by all ranks, in order, and wait for them."""
        launched = []  # all begin before the first is waited for
        for message in decisions:
            named = self._pending.get((message["set"], message["name"]))
            try:
                launched.append((named, self._launch(message, named)))
            except Exception as error:  # the same on all ranks, or they would wait for this one
                self._end(named, error)
                if isinstance(error, CollectiveError) and not isinstance(error, RanksDisagree):
                    raise  # else ranks can go on
        for named, handles in launched:
            for handle in handles:
                handle.wait()
            self._end(named, None)

    def _launch(self, message: Message, named: _Named | None) -> Sequence[Waitable]:
        communicator = self._communicator()
        if communicator is None:
            raise CollectiveError("the generation is over")
        members, numbers = message["members"], message["numbers"]
        if None in numbers and message["spec"] is None:
            joined = [m for m, n in zip(members, numbers, strict=True) if n is None]
            raise not_with_join(message["text"], joined)
        if (texts := message["texts"]) is not None:
            raise disagreement([message["text"] if t is None else t for t in texts], members)
        if named is None:  # this rank has joined
            operation: TensorOperation[Any] = Allreduce.of_zeros(message["spec"])
            operation.load_on(0, len(members))  # the zeros of all ranks are alike
        else:
            operation, named.launched = named.operation, True
        # Of its own, because operations without a name go on meanwhile, in the rank's thread.
        group = communicator.subgroup(members, f"names-{message['set']}")
        return operation.launch(group, [each or [] for each in numbers])

    def _end(self, named: _Named | None, error: Exception | None) -> None:
        if named is not None:  # else this rank has joined
            with self._lock:
                self._pending.pop((named.key, named.name), None)
            named.error = error
            named.ended.set()

    def _end_stuck(self, message: Message) -> None:
        sides: dict[str, list[int]] = {}
        for rank, text in message["sides"]:
            sides.setdefault(JOINED if text is None else text.partition("\n")[0], []).append(rank)
        error = RanksDisagree(f"ranks wait for different operations: {listed(sides)}")
        self._end(self._pending.get((message["set"], message["name"])), error)

    def _position(self) -> Message:
        """Return this rank's unnamed operation under way, and its count of operations."""
        communicator = self._communicator()
        with self._lock:
            begun, what = self._history[-1] if self._history else (0, None)
        comparing = self._comparing
        idle = communicator is None or communicator.waits_apart or not communicator.waiting
        if communicator is None or (idle and not comparing):
            return {"text": "", "begun": begun, "completed": 0}
        text = "state.commit()" if what == CHECK else comparing or communicator.current_operation
        return {"text": text or "an operation", "begun": begun, "completed": communicator.completed}

    def _tell(self, done: int) -> None:
        with self._lock:
            self._tells = True
            if not self.joined:
                for number, what in self._history:
                    if number > done:
                        self._client.send({"do": "step", "number": number, "what": what})

    def over(self, reason: str, *, closed: bool = False) -> None:
        """Fail everything under way and to come."""
        communicator = self._communicator()
        with self._lock:
            # Of a part, that rank need not be a member; who is one and lacks is seen by transports.
            compared = any(not (closed and key) for key, _ in self._comparisons)
            concerned = bool(self._pending) or compared or self.joined
        # Without names or joins, operations go on: the rank that matches may have returned first.
        if communicator is not None:
            if concerned:
                communicator.abort(reason)  # unless it is over already, with another reason
            try:
                communicator.check()
            except (CollectiveError, NotTheRank) as error:
                reason = str(error)
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        self._reason = reason  # before the loops: `offer` adds, and then reads it
        for named in [*self._pending.values()]:
            self._end(named, CollectiveError(reason))
        for comparison in [*self._comparisons.values()]:
            comparison.ended.set()
        for queue in self._answers.values():
            queue.put(None)

    def _next(self, kind: str) -> Message | None:
        """Wait for an answer; return None at the end, to each thread."""
        found = self._answers[kind].get()
        if found is None:
            self._answers[kind].put(None)
        return found


def _listen(alive: weakref.ref[Coordination], client: RendezvousClient) -> None:
    """Receive messages until the generation is over. Holds no reference while it sleeps."""
    reason = "the generation is over"
    try:
        client.connect()
        while True:
            messages = [client.receive()]
            while client.has_received:  # what came together is launched before the first wait
                messages.append(client.receive())
            coordination = alive()
            if coordination is None:
                return
            decisions: list[Message] = []
            for message in messages:
                if message["do"] == "go":
                    decisions.append(message)
                    continue
                coordination.launch_all(decisions)  # before a pong, which says that they are over
                decisions = []
                coordination.handle(message)
            coordination.launch_all(decisions)
            del coordination  # while it sleeps, the generation may be freed
    except CollectiveError as error:
        reason = str(error)
    except NotTheRank:
        return  # a fork
    except Exception as error:  # a bug; ranks must not hang because of it
        reason = repr(error)
    finally:
        client.close()
        coordination = alive()
        if coordination is not None:
            coordination.over(reason, closed=True)


_coordinations: weakref.WeakKeyDictionary[Communicator, Coordination] = weakref.WeakKeyDictionary()


def coordination_of(communicator: Communicator) -> Coordination | None:
    """Return the coordination of a communicator of all ranks; None for a rank alone."""
    known = _coordinations.get(communicator)
    if known is None:
        client = communicator.matching_client()
        if client is None:
            return None
        communicator.check()  # no connection for a generation that is over
        known = _coordinations[communicator] = Coordination(communicator, client)
    return known


# A rank that ends without any operation must be missed as well.
when_formed.append(coordination_of)


def announce(communicator: Communicator, what: Any) -> None:
    """Number an operation of all ranks that this rank is about to begin."""
    # A joined rank is told as JSON: the spec of a service, or a verb that it cannot take part in.
    coordination = coordination_of(communicator)
    if coordination is not None:
        coordination.announce(what)


apart.append(
    lambda communicator, text, number: coordination_over(communicator).compare(
        communicator, text, number, foresee=False
    )
)


def coordination_over(communicator: Communicator) -> Coordination:
    """Return the coordination of a generation, by any of its communicators of several ranks."""
    part = communicator.part_of
    whole = communicator if part is None else part[0]()
    if whole is None or (coordination := coordination_of(whole)) is None:
        raise CollectiveError("the generation is over")
    return coordination


def _disagreement(decision: Message) -> RanksDisagree:
    members = decision["members"] if decision["set"] else None
    return disagreement(decision["texts"], members, decision["values"])


def is_joined(communicator: Communicator) -> bool:
    """Return whether this rank has joined, and only takes part."""
    coordination = _coordinations.get(communicator)
    return coordination is not None and coordination.joined


def not_with_join(text: str, ranks: list[int]) -> RanksDisagree:
    """Return the error for an operation that joined `ranks` cannot take part in."""
    head = text.partition("\n")[0]
    verb = head.partition(" ")[0].capitalize()
    joined = listed({JOINED: ranks}).partition(":")[0]
    have = "has" if len(ranks) == 1 else "have"
    return RanksDisagree(
        f"{verb} is not supported with Join at this time: {joined} {have} joined; {head}"
    )
