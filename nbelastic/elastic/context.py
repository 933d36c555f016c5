"""A rank's place in its job: who it is, whom it can talk to, and what it must know of changes.

A :class:`Context` belongs to one rank and is used by that rank's thread. Inside a job it is a
:class:`~nbelastic.elastic.session.Session`, which speaks with the worker's agent; outside a job
``init()`` makes a :class:`LocalContext`, a world of one, so that a training function runs plainly
in a cell or under a debugger.

How ranks agree to leave a generation at the same step, without a collective of their own
-------------------------------------------------------------------------------------------
Each rank hears of a coming change at its own moment (:meth:`Context.change_flag`). The flag rides
on a reduction that takes place anyway (the optimizer adds one element to its last bucket), so all
ranks read the same sum and note it with :meth:`Context.agree`. At the next commit
:meth:`Context.check_membership` acts on what was agreed, and all of them at the same one. Only
where no reduction carried a flag since the last check does the check make a small one of its own;
whether that is so is the same on all ranks.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import threading
from typing import TYPE_CHECKING

from nbelastic.collectives import Op, SoloCommunicator
from nbelastic.elastic.vitals import Vitals
from nbelastic.errors import NotInitialized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbelastic.collectives import Communicator
    from nbelastic.elastic.room import Room

__all__ = ["Context", "LocalContext", "activate", "current", "initialize", "one_of_all", "shutdown"]


class Context(abc.ABC):
    """What a rank knows of itself and its job.

    Attributes
    ----------
    rank, size : int
        Position in, and number of, the members; what the driver foresees until the first
        generation has formed.
    local_rank, local_size : int
        The same within the host.
    cross_rank, cross_size : int
        Position of this host among, and number of, the hosts that have this local rank.
    generation : int
        Number of the present generation; 0 before the first.
    version : int
        Serial number of this rank's last commit; 0 before the first.
    ahead : bool
        Whether something newer stands in for that commit: the state at the end of a later step.
    source : int
        Rank that holds the newest state of this generation: the root of a synchronisation.
    vitals : Vitals
        What it tells people of itself.
    exchanges : int
        How often the communicator was asked for: something is sent soon after.
    before_exchange : tuple of callables
        Called each time before that.
    room : Room or None
        Memory for a state to arrive in.
    warm_up : callable or None
        Has the state do what costs time only once.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    generation: int
    version: int
    source: int
    vitals: Vitals
    ahead = False
    exchanges = 0
    before_exchange: tuple[Callable[[], None], ...] = ()
    room: Room | None = None
    warm_up: Callable[[], Sequence[tuple[int, int]]] | None = None

    def take_room(self) -> Room | None:
        """Return memory that was made ready for a state to arrive in; once."""
        room, self.room = self.room, None
        return room

    def about_to_exchange(self) -> None:
        """Tell who wants to know. Every :meth:`communicator` calls this."""
        self.exchanges += 1
        for tell in self.before_exchange:
            tell()

    @abc.abstractmethod
    def communicator(self) -> Communicator:
        """Return the communicator of the present generation.

        In a job without an elastic loop the first call makes this rank a member: it waits for the
        others.
        """

    @abc.abstractmethod
    def change_flag(self) -> bool:
        """Return whether this rank has heard that the membership is about to change."""

    @abc.abstractmethod
    def agree(self, changed: bool) -> None:
        """Note the flag that came out of a reduction over all ranks."""

    @abc.abstractmethod
    def committed(self) -> None:
        """Count a commit: the state just saved has the next version."""

    @abc.abstractmethod
    def check_membership(self) -> None:
        """Leave the generation here if all ranks have agreed to.

        Raises
        ------
        HostsUpdatedInterrupt
            The membership is about to change; the elastic loop re-forms.
        Leaving, Stopped, Evicted
            This rank ends here.
        """


def one_of_all(context: Context, mine: bool) -> bool:
    """Return whether any rank says so; all ask."""
    if context.size == 1:
        return mine
    import torch

    flag = torch.tensor([mine], dtype=torch.int32)
    context.communicator().allreduce(flag, Op.MAX)
    return bool(flag.item())


class LocalContext(Context):
    """A world of one, for a training function that runs outside a job."""

    def __init__(self) -> None:
        self.rank = self.local_rank = self.cross_rank = self.source = 0
        self.size = self.local_size = self.cross_size = 1
        self.generation = 1
        self.version = 0
        self.vitals = Vitals()
        self._communicator = SoloCommunicator(generation=1)

    def communicator(self) -> Communicator:
        """Return a communicator of one rank."""
        self.about_to_exchange()
        return self._communicator

    def change_flag(self) -> bool:
        """Return False: nobody joins a world of one."""
        return False

    def agree(self, changed: bool) -> None:
        """Do nothing: there is nobody to agree with."""

    def committed(self) -> None:
        """Count a commit."""
        self.version += 1
        self.ahead = False

    def check_membership(self) -> None:
        """Do nothing: the membership never changes."""


# A rank's context travels with its thread. Threads that a rank starts itself (a data loader's, a
# prefetcher's) do not inherit it, so a process that runs exactly one rank answers for all threads.
_of_thread: contextvars.ContextVar[Context | None] = contextvars.ContextVar(
    "nbelastic_context", default=None
)
_of_process: list[Context] = []
_lock = threading.Lock()


def current() -> Context:
    """Return the context of the calling rank.

    Raises
    ------
    NotInitialized
        Outside a job, before ``init()``; or in a thread of its own in a process with several ranks.
    """
    context = _of_thread.get()
    if context is not None:
        return context
    with _lock:
        if len(_of_process) == 1:
            return _of_process[0]
    raise NotInitialized("call nbelastic.init() (hvd.init()) before using ranks and collectives")


@contextlib.contextmanager
def activate(context: Context) -> Iterator[None]:
    """Make `context` that of the calling thread, for the length of a ``with`` block."""
    token = _of_thread.set(context)
    with _lock:
        _of_process.append(context)
    try:
        yield
    finally:
        with _lock:
            _of_process.remove(context)
        _of_thread.reset(token)


def initialize() -> None:
    """Make sure that the calling thread has a context: its job's, else a world of one."""
    try:
        current()
    except NotInitialized:
        context = LocalContext()
        _of_thread.set(context)
        with _lock:
            _of_process.append(context)


def shutdown() -> None:
    """Leave the world of one that :func:`initialize` made; inside a job, do nothing."""
    context = _of_thread.get()
    if isinstance(context, LocalContext):
        with _lock:
            if context in _of_process:
                _of_process.remove(context)
        _of_thread.set(None)
