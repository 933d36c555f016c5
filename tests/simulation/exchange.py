"""Where ranks meet, and what they exchange there, over the simulated network.

When a member's process dies, only its two neighbours notice; the others hang until they are
aborted or the operation's time is up. A stopped peer, or one behind a cut, is noticed by nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbelastic.collectives import Communicator, Rendezvous, SoloCommunicator

from .ring import SimCommunicator, SimHandle

if TYPE_CHECKING:
    from .fibers import Fiber
    from .network import Network


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
