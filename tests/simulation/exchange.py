"""Where ranks meet, and what they exchange there, over the simulated network.

When a member's process dies, only its two neighbours notice; the others hang until they are
aborted or the operation's time is up. A stopped peer, or one behind a cut, is noticed by nobody.
Tensors are really reduced, so a wrong world shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nbelastic.collectives import Communicator, Handle, Op, Rendezvous, SoloCommunicator
from nbelastic.collectives.consistency import History
from nbelastic.errors import CollectiveError
from tests.membership.ranks import NEIGHBOUR_NOTICES

from .loop import Fiber, Process
from .network import Network

if TYPE_CHECKING:
    import torch


class Exchange:
    """All stores and rooms; also the record of who exchanged what with whom."""

    def __init__(self, network: Network) -> None:
        self.network, self.hub = network, network.hub
        self.stores: dict[tuple[str, int], SimStore] = {}
        self.groups: dict[tuple[str, int, tuple[str, int]], Group] = {}
        self.open: dict[Fiber, Communicator] = {}
        self._port = 20000

    def open_store(self, bind: str, _secret: bytes) -> SimStore:
        """Open a store in the process of the calling fiber."""
        self._port += 1
        return SimStore(self, (bind, self._port))

    def connect(self, rendezvous: Rendezvous) -> Communicator:
        """Return a communicator for the calling fiber, not yet connected."""
        if rendezvous.size == 1:
            communicator: Communicator = SoloCommunicator(rendezvous.generation)
        else:
            communicator = SimCommunicator(self, rendezvous)
        self._one_generation(communicator)
        return communicator

    def _one_generation(self, communicator: Communicator) -> None:
        """A rank never has two communicators that work."""
        fiber = self.hub.current
        other = self.open.get(fiber)
        self.hub.require(
            other is None or is_broken(other),
            f"{fiber.name} is in generations {other and other.generation} "
            f"and {communicator.generation}",
        )
        self.open[fiber] = communicator

    def group(self, rendezvous: Rendezvous) -> Group:
        key = (rendezvous.job, rendezvous.generation, rendezvous.store)
        if key not in self.groups:
            self.groups[key] = Group(self, rendezvous)
        return self.groups[key]


def is_broken(communicator: Communicator) -> bool:
    """Whether nothing can go through a communicator any more."""
    if isinstance(communicator, SimCommunicator):
        return communicator.broken is not None
    assert isinstance(communicator, SoloCommunicator)
    return communicator._broken is not None


class SimStore:
    """Where the ranks of a generation meet; lives in the process that opened it."""

    def __init__(self, exchange: Exchange, address: tuple[str, int]) -> None:
        fiber = exchange.hub.current
        self.address, self.process = address, fiber.process
        self.closed = False
        self._exchange = exchange
        exchange.stores[address] = self

    def close(self) -> None:
        self.closed = True
        self._exchange.stores.pop(self.address, None)


class Group:
    """The members of one generation who meet at one store."""

    def __init__(self, exchange: Exchange, rendezvous: Rendezvous) -> None:
        self.exchange, self.size = exchange, rendezvous.size
        self.generation = rendezvous.generation
        self.members: dict[int, SimCommunicator] = {}
        self.operations: dict[int, Operation] = {}

    def enter(self, member: SimCommunicator) -> None:
        """A member has come to the store; with the last of them, all are connected."""
        other = self.members.get(member.rank)
        require = self.exchange.hub.require
        require(
            other is None or other is member,
            f"two ranks {member.rank} in generation {self.generation}: "
            f"{other and other.who} and {member.who}",
        )
        require(member.size == self.size, f"sizes differ in generation {self.generation}")
        self.members[member.rank] = member
        if any(each.broken is not None for each in self.members.values()):
            for each in self.members.values():
                each.hear_of("a rank that had come is gone")
        elif len(self.members) == self.size:
            for each in self.members.values():
                each.later(each.connected)

    def operation(self, number: int, kind: str) -> Operation:
        """Return the n-th operation; whoever comes first says what it is."""
        if number not in self.operations:
            self.operations[number] = Operation(self, kind)
        return self.operations[number]

    def lost(self, member: SimCommunicator) -> None:
        """A member's connections are closed: its neighbours notice, nobody else."""
        if len(self.members) < self.size:
            for each in list(self.members.values()):
                each.hear_of("a rank that had come is gone")
            return
        for step in {1, self.size - 1}:
            neighbour = self.members[(member.rank + step) % self.size]
            if neighbour is not member:
                neighbour.hear_of("connection closed by peer", member)


class Operation:
    """The n-th operation of a group."""

    def __init__(self, group: Group, kind: str) -> None:
        self.group, self.kind = group, kind
        self.parts: dict[int, Any] = {}
        self.waiting: dict[int, SimHandle] = {}
        self._result: Any = None

    def bring(self, handle: SimHandle, kind: str, part: Any) -> None:
        member = handle.member
        self.group.exchange.hub.require(
            kind == self.kind,
            f"in generation {self.group.generation} {member.who} calls {kind}, others {self.kind}",
        )
        self.parts[member.rank] = part
        self.waiting[member.rank] = handle
        if len(self.parts) == self.group.size:
            self.circulate()

    def circulate(self) -> None:
        """Everything is there: it arrives at each member, unless the network is cut somewhere."""
        network = self.group.exchange.network
        members = self.group.members
        for rank, member in members.items():
            peer = members[(rank + 1) % self.group.size]
            if network.blocked(member.process, peer.process):
                network.hold(self.circulate)
                return
        for handle in self.waiting.values():
            handle.member.landing += 1
            handle.member.later(handle.land)

    def result(self, combine: Callable[[dict[int, Any]], Any]) -> Any:
        if self._result is None:
            self._result = combine(self.parts)
        return self._result


class SimHandle:
    """An operation under way, as one member sees it."""

    def __init__(self, member: SimCommunicator, fill: Callable[[], None]) -> None:
        self.member = member
        self._fill = fill
        self._done = self._counted = False

    @classmethod
    def ended(cls, member: SimCommunicator) -> SimHandle:
        """Return the handle of an operation that has succeeded."""
        handle = cls(member, lambda: None)
        handle._done = True
        return handle

    def done(self) -> bool:
        return self._done or self.member.broken is not None

    def land(self) -> None:
        self.member.landing -= 1
        self.finish()

    def finish(self) -> None:
        if self.member.broken is None:
            self._fill()
            self._done = True
            self.member.wake()

    def wait(self) -> None:
        if self._counted:
            return
        self.member.wait_for(lambda: self._done)
        self._counted = True
        self.member._completed += 1


class SimCommunicator(Communicator):
    """A member of a group."""

    name = "simulated"

    def __init__(self, exchange: Exchange, rendezvous: Rendezvous) -> None:
        fiber = exchange.hub.current
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.generation = rendezvous.generation
        self.who = fiber.name
        self.process: Process = fiber.process
        self.broken: str | None = None
        self.history, self._subgroups = History(), {}
        self._exchange, self._rendezvous = exchange, rendezvous
        self._network: Network = exchange.network
        self._fiber: Fiber = fiber
        self._group: Group | None = None
        self.landing = 0
        self.orderly = True
        self._ready = self._waiting = False
        self._completed = self._begun = 0
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self.mail: dict[tuple[int, int], torch.Tensor] = {}  # by source and number
        self.awaited: dict[tuple[int, int], SimHandle] = {}
        self.process.mourners.append(self._die)

    # -- connecting ---------------------------------------------------------------------------

    def connect(self) -> SimCommunicator:
        self.check()
        store = self._exchange.stores.get(self._rendezvous.store)
        if store is None or not store.process.alive:
            self._fiber.sleep(self._network.delay())
            self.abort("connection refused")
            self.check()
        self._network.post(self.process, store.process, lambda: self._come(store))
        self.wait_for(lambda: self._ready, counts=False)
        return self

    def _come(self, store: SimStore) -> None:
        if store.closed:
            self.hear_of("connection refused")
        elif self.broken is None:
            self._group = self._exchange.group(self._rendezvous)
            self._group.enter(self)

    def connected(self) -> None:
        self._ready = True
        self.wake()

    # -- what happens to it -------------------------------------------------------------------

    def later(self, action: Callable[[], None]) -> None:
        self.process.call_later(self._network.delay(), action)

    def wake(self) -> None:
        if self._waiting:
            self._fiber.wake()

    def hear_of(self, trouble: str, source: SimCommunicator | None = None) -> None:
        """A connection breaks; noticed a little later."""
        delay = NEIGHBOUR_NOTICES * (0.5 + self._exchange.hub.random.random())
        self.process.call_later(delay, self._notice, trouble, source)

    def _notice(self, trouble: str, source: SimCommunicator | None) -> None:
        if source is not None and self._network.blocked(source.process, self.process):
            self._network.hold(lambda: self.hear_of(trouble, source))
        elif self.landing and source is not None and source.orderly:
            self.hear_of(trouble, source)  # what was sent before the end arrives before it
        else:
            self.abort(trouble)

    def _die(self) -> None:
        if self.broken is None:
            self.broken, self.orderly = "its process is dead", False
            if self._group is not None:
                self._group.lost(self)

    def abort(self, reason: str) -> None:
        if self.broken is None:
            self.broken = reason
            self.wake()
            if self._group is not None:
                self._group.lost(self)

    def close(self) -> None:
        self.abort("the communicator is closed")
        if self._die in self.process.mourners:
            self.process.mourners.remove(self._die)

    def wait_for(self, done: Callable[[], bool], *, counts: bool = True) -> None:
        assert self._exchange.hub.current is self._fiber, "a communicator belongs to one thread"
        deadline = self._exchange.hub.now + self._rendezvous.timeout_s
        while True:
            self.check()
            if done():
                return
            self._waiting = True
            try:
                if not self._fiber.park(max(deadline - self._exchange.hub.now, 0.001)):
                    self.abort("timed out")
            finally:
                self._waiting = False

    def check(self) -> None:
        if self.broken is not None:
            raise CollectiveError(self.broken)

    @property
    def waiting(self) -> bool:
        return self._waiting

    @property
    def completed(self) -> int:
        return self._completed

    @property
    def gone(self) -> tuple[int, ...]:
        """The ranks of this host whose processes have ended: the system says so at once."""
        members = {} if self._group is None else self._group.members
        host = self.process.host
        its = [each for each in members.values() if each.process.host == host]
        return tuple(each.rank for each in its if not each.process.alive)

    # -- operations ---------------------------------------------------------------------------

    def _begin(self, kind: str, part: Any, fill: Callable[[Operation], None]) -> Handle:
        self.check()
        assert self._ready, "an operation before the group has connected"
        group = self._group
        number, self._begun = self._begun, self._begun + 1
        operation = group.operation(number, kind)
        handle = SimHandle(self, lambda: fill(operation))
        operation.bring(handle, kind, part)
        return handle

    def matching_client(self) -> None:
        return None

    def begin_nothing(self) -> Handle:
        self.check()
        return SimHandle.ended(self)

    def begin_allreduce(self, tensors: Sequence[torch.Tensor], op: Op) -> Handle:
        (tensor,) = tensors

        def fill(operation: Operation) -> None:
            tensor.copy_(operation.result(lambda parts: _reduce(list(parts.values()), op)))

        return self._begin(f"allreduce {op.value} of {tuple(tensor.shape)}", tensor.clone(), fill)

    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        kind = f"broadcast from {root} of {tuple(tensor.shape)}"
        part = tensor.clone() if root == self.rank else None
        return self._begin(kind, part, lambda operation: _copy(tensor, operation.parts[root]))

    def begin_allgather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Handle:
        def fill(operation: Operation) -> None:
            for rank, output in enumerate(outputs):
                output.copy_(operation.parts[rank])

        return self._begin(f"allgather of {tuple(tensor.shape)}", tensor.clone(), fill)

    def begin_all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        def fill(operation: Operation) -> None:
            for rank, output in enumerate(outputs):
                output.copy_(operation.parts[rank][self.rank])

        return self._begin("all_to_all", [t.clone() for t in inputs], fill)

    def begin_barrier(self) -> Handle:
        return self._begin("barrier", None, lambda _: None)

    def begin_send(self, parts: Sequence[torch.Tensor], to: int) -> Handle:
        import torch

        self.check()
        receiver = self._group.members[to]
        copy = torch.cat(list(parts))
        number = self._sent[to] = self._sent.get(to, -1) + 1

        def arrive() -> None:
            receiver.mail[self.rank, number] = copy
            if (self.rank, number) in receiver.awaited:
                receiver.awaited.pop((self.rank, number)).finish()

        self._network.post(self.process, receiver.process, arrive)
        handle = SimHandle(self, lambda: None)
        self.landing += 1  # the system has taken it: its receiver's orderly end cannot undo that
        self.later(handle.land)
        return handle

    def begin_receive(self, tensor: torch.Tensor, source: int) -> Handle:
        self.check()
        number = self._received[source] = self._received.get(source, -1) + 1
        message = (source, number)
        handle = SimHandle(self, lambda: tensor.view(-1).copy_(self.mail.pop(message).view(-1)))
        if message in self.mail:
            handle.finish()
        else:
            self.awaited[message] = handle
        return handle


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target is not source:
        target.copy_(source)


def _reduce(parts: list[torch.Tensor], op: Op) -> torch.Tensor:
    import torch

    kinds = {Op.MIN: torch.minimum, Op.MAX: torch.maximum, Op.PRODUCT: torch.mul}
    total = functools.reduce(kinds.get(op, torch.add), parts)
    return total / len(parts) if op is Op.AVERAGE else total
