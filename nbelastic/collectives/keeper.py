"""The one who owns a Gloo group, from its making to its end.

Gloo blocks in three places where a rank must not: connecting cannot be interrupted, operations
cannot be broken off, and a group's destructor waits for both. So every group has a thread of its
own, its keeper, in which it is born and in which it dies:

- *forming*: the keeper constructs the group and checks that its peers are of the same
  generation, while the rank's thread waits for the outcome or an abort;
- *whole*: the keeper sleeps. The rank's thread uses the group, holding ``hands`` while it does;
- *ending*: woken by the alarm, the keeper, unless the group was closed in good order, lets what
  moves arrive and then severs the connections, so that whatever is stuck fails, here and on the
  peers; joins the lanes; takes from the handles what they hold; drops the group; and ends. (A
  message in the middle of which its peer dies or stops lasts until its timeout: a flaw of Gloo's.)

An abort while the group is forming takes effect in the keeper when Gloo returns: at once where the
rank still waits for others to come, within five times :data:`FORMING_LIMIT_S` where it is
connecting to one that came and does not answer. The rank's thread has left long since.

Groups are connected in full, not lazily. It takes about as long up to a dozen ranks, it leaves no
connection to be made in the middle of a step, where a store would have to be asked and a peer might
be waited for in vain, and after it everyone is known to be there.

The rank's thread never drops a last reference to the group: it uses it only inside an
expression, under ``hands``, and the keeper takes ``hands`` before it lets go.

A keeper ends by itself. One that is left when the interpreter exits is made to, and given
:data:`EXIT_LIMIT_S`: a thread that comes back from C++ into an interpreter that is gone would
abort the process.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
from torch._C._distributed_c10d import ProcessGroupGloo

from nbelastic.collectives.flights import CollectiveFlight, OperationFailed, first_sentence
from nbelastic.collectives.lanes import Lane
from nbelastic.collectives.meeting import Meeting
from nbelastic.collectives.proof import PROOF_BYTES, proof
from nbelastic.collectives.sever import ends_of, sever

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

    from nbelastic.collectives.alarm import Alarm, Bell
    from nbelastic.collectives.communicator import Rendezvous
    from nbelastic.collectives.flights import Flight

__all__ = ["EXIT_LIMIT_S", "FORMING_LIMIT_S", "Keeper"]

# Connecting to a peer that was at the meeting a moment ago takes milliseconds, or does not work.
# Gloo gives a connection five times as long as it is told.
FORMING_LIMIT_S = 10.0

EXIT_LIMIT_S = 2.0

# A message that is cut in the middle is one that Gloo never ends, except by its timeout: it tells
# those who wait for messages not begun, and forgets the one under way, and one that it comes to
# write too late. Between ranks that are alive, what has begun to move arrives in less than this.
DRAIN_LIMIT_S = 0.25

# Older versions keep the limit that they were made with for every operation.
_TIMEOUT_CAN_CHANGE = hasattr(ProcessGroupGloo, "set_timeout")


class Keeper:
    """Owner of one group.

    Parameters
    ----------
    rendezvous : Rendezvous
        Which ranks form the group.
    alarm : Alarm
        What ends it.

    Attributes
    ----------
    hands : threading.Lock
        Held by the rank's thread wherever it has hold of anything of Gloo's.
    """

    def __init__(self, rendezvous: Rendezvous, alarm: Alarm) -> None:
        self.hands = threading.Lock()
        self._under_way: set[Flight] = set()
        self._flights: list[weakref.ref[Flight]] = []
        self._rendezvous = rendezvous
        self._alarm = alarm
        self._meeting = meeting = Meeting(rendezvous)
        alarm.then(lambda *_: meeting.leave())
        self._group: ProcessGroup | None = None
        self._lanes: dict[str, Lane] = {}
        self._thread: threading.Thread | None = None

    @property
    def group(self) -> ProcessGroup:
        """The group, for use inside an expression, under ``hands``."""
        assert self._group is not None
        return self._group

    def check_formed(self) -> None:
        """Raise if the group has not formed, and not ended either."""
        if self._group is None and self._alarm.reason is None:
            raise RuntimeError("connect() comes before any operation")

    def watch(self, flight: Flight) -> None:
        """Note an operation that has begun. The caller has the hands.

        It is under way until it is settled, whether or not somebody still has its handle.
        """
        self._under_way.add(flight)
        self._flights.append(weakref.ref(flight))

    def settle(self, flight: Flight) -> None:
        """Note that an operation has ended well."""
        self._under_way.discard(flight)

    def flights(self) -> list[Flight]:
        """Return the operations that are under way, or that somebody may still wait for."""
        living = [(reference, reference()) for reference in self._flights]
        self._flights = [reference for reference, flight in living if flight is not None]
        return [flight for _, flight in living if flight is not None]

    def lane(self, direction: str) -> Lane:
        """Return the lane of a direction, such as ``to-3``."""
        if direction not in self._lanes:
            name = f"{self._name()}-{direction}"
            self._lanes[direction] = Lane(name, self._rendezvous.timeout_s)
        return self._lanes[direction]

    def form(self) -> None:
        """Start the keeper and wait until the group has formed, or for the alarm."""
        if self._thread is not None:
            raise RuntimeError("connect() is called once")
        with self._alarm.bell() as bell:
            self._thread = threading.Thread(
                target=self._keep, args=(bell,), name=self._name(), daemon=True
            )
            _at_work.add(self)
            self._thread.start()
            bell.get()
        self._alarm.check()

    def end(self, reason: str) -> None:
        """Raise the alarm. Any thread may call it."""
        self._alarm.raise_(reason)

    def join(self, timeout_s: float) -> None:
        """Wait until the group has ended, or the time is over."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _name(self) -> str:
        return f"nbelastic-gloo-{self._rendezvous.generation}-{self._rendezvous.rank}"

    def _keep(self, formed: Bell[bool]) -> None:
        with self._alarm.bell() as bell:
            try:
                self._form()
            except Exception as error:
                cause = self._meeting.failure or first_sentence(error)
                self._alarm.raise_(
                    f"generation {self._rendezvous.generation} did not form: {cause}"
                )
            else:
                formed.put(True)
            bell.get()
        self._let_go()
        _at_work.discard(self)

    def _form(self) -> None:
        its = self._rendezvous
        self._group = _make_group(self._meeting, its)
        self._check_peers()
        if _TIMEOUT_CAN_CHANGE:
            self._group.set_timeout(timedelta(seconds=its.timeout_s))

    def _check_peers(self) -> None:
        """Make sure that who connected is who was meant.

        Gloo takes a connection for what it claims to be: that of a stranger too, or one meant for
        a group that is over, whose port this group was given. So each rank proves what it is.
        """
        its = self._rendezvous
        tokens = [torch.zeros(PROOF_BYTES, dtype=torch.uint8) for _ in range(its.size)]
        with self.hands:
            work = self.group.allgather([tokens], [_token(its, its.rank)])
            flight = CollectiveFlight(work, self.hands)
            del work
            self.watch(flight)
        if not flight.wait(self._alarm):
            return
        self.settle(flight)
        for rank, token in enumerate(tokens):
            if not torch.equal(token, _token(its, rank)):
                raise OperationFailed(
                    f"rank {rank} is of another generation, or no rank of this job"
                )

    def cut(self) -> int:
        """Cut the connections of the group, as a broken network would; return how many."""
        ends = ends_of(self._meeting.addresses, self._rendezvous.rank)
        return 0 if ends is None else sever(ends)

    def _let_go(self) -> None:
        """End the group. The alarm has been raised: nothing new is begun under ``hands``."""
        with self.hands:
            pass  # the rank's thread is out of Gloo now, or will be back only to see the alarm
        ends = ends_of(self._meeting.addresses, self._rendezvous.rank)
        if ends is not None and not self._alarm.gentle:
            self._drain()
            sever(ends)
        for lane in self._lanes.values():
            lane.join()
        with self.hands:
            stripped = [flight.strip() for flight in self.flights()]
            group, self._group = self._group, None
        del stripped
        del group

    def _drain(self) -> None:
        """Let messages that are half over arrive. Their peers do the same.

        An operation that failed here has ended here only: for the others, which may be in the
        middle of it, this rank is still the one to write to.
        """
        end = time.monotonic() + DRAIN_LIMIT_S
        while time.monotonic() < end and not all(_is_over(flight) for flight in self.flights()):
            time.sleep(0.005)


def _is_over(flight: Flight) -> bool:
    return flight.done() and flight.failure() is None


def _make_group(meeting: Meeting, rendezvous: Rendezvous) -> ProcessGroup:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    limit = rendezvous.timeout_s
    if _TIMEOUT_CAN_CHANGE:
        limit = min(limit, FORMING_LIMIT_S)
    options._timeout = timedelta(seconds=limit)
    options._devices = [ProcessGroupGloo.create_device(hostname=rendezvous.bind, lazy_init=False)]
    group = ProcessGroupGloo(meeting, rendezvous.rank, rendezvous.size, options)
    return cast("ProcessGroup", group)  # as its stubs say, except that they leave out the methods


def _token(rendezvous: Rendezvous, rank: int) -> torch.Tensor:
    name = f"{rendezvous.job}/{rendezvous.generation}/{rank}".encode()
    token = proof(rendezvous.secret, "peer", name)
    return torch.frombuffer(bytearray(token), dtype=torch.uint8)


_at_work: set[Keeper] = set()


@atexit.register
def _end_all() -> None:
    keepers = list(_at_work)
    for keeper in keepers:
        keeper.end("the process is exiting")
    deadline = time.monotonic() + EXIT_LIMIT_S
    for keeper in keepers:
        keeper.join(max(0.0, deadline - time.monotonic()))
