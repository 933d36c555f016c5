"""Context of a rank: its place in the job, and agreement on changes.

A :class:`Context` belongs to one rank and is used by that rank's thread. Inside a job it is a
:class:`.session.Session`. Outside a job ``init()`` makes a world of one rank, so that a training
function runs in a cell or under a debugger.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from nbelastic.collectives import Communicator, SoloCommunicator
from nbelastic.elastic.ranks.telemetry import Telemetry
from nbelastic.errors import NotInitialized, NotTheRank

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.step_share import StepShare
    from nbelastic.elastic.state.state_payload import ReceiveBuffer

T = TypeVar("T")

# Ranks leave a generation at the same step, without a collective of their own. Each rank learns of
# a coming change at its own moment (`change_flag`). The flag rides on a reduction that takes place
# anyway: the optimizer adds one element to its last bucket. All ranks read the same sum and record
# it with `agree`. At the next commit `check_membership` acts on it, on all ranks at the same one.
# Only if no reduction has carried a flag since the last check does the check make a small one. That
# is the case on all ranks or on none.


class Context:
    """Place of a rank in its job, and its access to the other ranks; by itself a world of one rank.

    Until the first generation has formed, ranks and sizes are those that the driver foresees.
    """

    rank = 0
    size = 1
    local_rank = 0  # within the host
    local_size = 1
    cross_rank = 0  # of this host among those that have this local rank
    cross_size = 1
    generation = 1  # 0 before the first
    version = 0  # serial number of this rank's last commit; 0 before the first
    source = 0  # rank that holds the newest state: the root of a synchronisation
    loops = 0  # elastic loops that it has entered
    ahead = False  # the state at the end of a later step has replaced that commit
    exchanges = 0  # calls of :meth:`communicator`, each just before an operation
    before_exchange: tuple[Callable[[], None], ...] = ()  # called before each of these
    defers = False  # whether the operation that begins may wait behind others of process groups
    # Called as each generation has formed, before the state is synchronised.
    after_forming: tuple[Callable[[], None], ...] = ()
    # Whether there is a process group of torch.distributed with other ranks; None without a group.
    in_torch_group: bool | None = None
    receive_buffer: ReceiveBuffer | None = None
    max_np: int | None = None  # that the job was started with; None if there is no limit
    # Returns a partition of a Dask collection by the text of its key; any thread may call it.
    fetch_partition: Callable[[str], Any] | None = None
    scratch = ""  # directory, which need not exist, deleted when the rank's process has ended
    share: StepShare | None = None  # of the step under way; None without a loader
    time_to_save = 0.0  # seconds to write the state that no other rank has, when leaving; else 0
    is_shut_down = False  # the user has called ``shutdown()``, and not ``init()`` again
    # Root of a broadcast that names rank 0; while a state of the user's synchronises, `source`.
    rank_0_stands_for = 0
    home: threading.Thread | None = None  # that runs the user's function
    _thread: threading.Thread | None = None  # operations of all ranks belong to it
    _caller: int | None = None  # its number
    _older: Collection[threading.Thread] = ()  # that ran before the present generation had formed

    def __init__(self) -> None:
        self.telemetry = Telemetry()
        self._communicator: Communicator | None = SoloCommunicator(generation=1)
        # Counts of groups by their members, with the generation in which they were made.
        self.groups_made: dict[str, int] = {}
        # Threads to which operations of groups of some ranks belong, by the groups' keys.
        self.owners: dict[str, threading.Thread] = {}
        self._kept: dict[object, Any] = {}

    def kept(self, kind: Callable[[Any], T]) -> T:
        """Return this rank's only object of a class, made for its context at the first call."""
        if kind not in self._kept:
            self._kept[kind] = kind(self)
        found: T = self._kept[kind]
        return found

    def warn(self, detail: str) -> None:
        """Add a warning to the history of the job.

        `detail` has the problem on its first line, and on further lines the cause and what to do.
        The history shows equal warnings of several ranks once.
        """
        self.note("warning", detail)

    def note(self, about: str, detail: str = "", figures: dict[str, float] | None = None) -> None:
        """Add an entry to the history of the job; outside a job, do nothing.

        `about` is its kind. The text of some kinds is made of `figures`.
        """

    def is_ranks_thread(self) -> bool:
        """Return whether operations of all ranks belong to the calling thread, or would."""
        if threading.get_ident() == self._caller or self.size == 1:
            return True
        owner, thread = self._thread, threading.current_thread()
        if _runs_backward(thread):
            return True
        return (owner is None or not owner.is_alive()) and thread is (self.home or thread)

    def is_older(self, thread: threading.Thread) -> bool:
        """Return whether a thread was started in an earlier generation of this rank."""
        return thread in self._older and thread is not self.home

    def about_to_exchange(self) -> None:
        """Count an operation and call ``before_exchange``. :meth:`communicator` calls this."""
        if threading.get_ident() != self._caller:
            self._take_over()
        self.exchanges += 1
        for call in self.before_exchange:
            call()

    def _take_over(self) -> None:
        """Make the calling thread the owner of operations; refuse a second thread.

        Ranks pair operations by their order, which is undefined for two threads.
        """
        if self.size == 1:
            return
        thread = threading.current_thread()
        with _lock:
            owner = self._thread
            if owner is None or not owner.is_alive():
                self._thread, self._caller = thread, thread.ident
                return
        if not _runs_backward(thread):  # autograd's threads act for the owner
            raise NotTheRank(
                f"thread {thread.name!r} called an operation between ranks, but those of rank "
                f"{self.rank} belong to thread {owner.name!r}: operations are paired with those of "
                "other ranks by their order, which two threads do not have. Call all from one "
                "thread, end the first thread before, or give the second a group of its own "
                "(torch.distributed.new_group, hvd.add_process_set)"
            )

    def communicator(self) -> Communicator:
        """Return the communicator of the present generation.

        In a job without an elastic loop the first call makes this rank a member, and waits for the
        others.
        """
        self.about_to_exchange()
        return self._formed_elsewhere()

    def formed(self) -> Communicator:
        """Return the communicator of all ranks, for what is no operation of all; any thread."""
        if not self.is_ranks_thread():
            return self._formed_elsewhere()
        communicator = self.communicator()
        self.exchanges -= 1
        return communicator

    def _formed_elsewhere(self) -> Communicator:
        """Return the communicator of all ranks to a thread that is not the rank's own."""
        assert self._communicator is not None
        return self._communicator

    def starts(self) -> list[int]:
        """Return what names the present ranks, by rank; nothing before the first generation."""
        return list(range(self.size))

    def first_starts(self) -> list[int]:
        """Return the starts of this rank's first generation; none if others trained before."""
        return self.starts()

    def change_flag(self) -> bool:
        """Return whether this rank knows that the membership is about to change."""
        return False

    def agree(self, changed: bool) -> None:
        """Record the flag that a reduction over all ranks has returned."""

    def committed(self) -> None:
        """Count a commit: the state just saved has the next version."""
        self.version += 1
        self.ahead = False

    def check_membership(self) -> None:
        """Leave the generation here if all ranks have agreed to.

        Raises
        ------
        HostsUpdatedInterrupt
            The membership is about to change; the elastic loop re-forms.
        Leaving, Stopped, Evicted
            This rank ends here.
        """


# Called before ranks ask each other whether to leave the generation, for each new generation, and
# by ``shutdown()``.
before_check: list[Callable[[Communicator], None]] = []
when_formed: list[Callable[[Communicator], object]] = []
at_shutdown: list[Callable[[Context], None]] = []


def one_of_all(context: Context, mine: bool) -> bool:
    """Return whether the flag is set on any rank; all ranks call this."""
    if context.size == 1:
        return mine
    communicator = context.communicator()
    for call in before_check:
        call(communicator)
    return any(communicator.agree("a check for host updates, as in commit()", mine))


def _runs_backward(thread: threading.Thread) -> bool:
    """Return whether the calling thread is autograd's own, which Python has not started."""
    torch = sys.modules.get("torch")
    is_pythons = not isinstance(thread, threading._DummyThread)
    return not is_pythons and torch is not None and torch._C._current_graph_task_id() != -1


# A rank's context belongs to its thread. Threads that a rank starts itself (a data loader's, a
# prefetcher's) do not inherit it, so a process with exactly one rank gives it to all threads.
_of_thread: contextvars.ContextVar[list[Context]] = contextvars.ContextVar("nbelastic_context")
"""The rank's context, in a list that is emptied when the rank ends, because timers of an event loop
keep copies of the context variables for as long as the loop runs."""
_of_process: list[Context] = []
_lock = threading.Lock()


def current() -> Context:
    """Return the context of the calling rank; NotInitialized outside a job, before ``init()``."""
    context = current_or_none()
    if context is None:
        message = "call nbelastic.init() (hvd.init()) before using ranks and collectives"
        raise NotInitialized(message)
    return context


def current_or_none() -> Context | None:
    """Return the context of the calling rank; None before it has any."""
    own = _of_thread.get(())
    if own:
        return own[0]
    with _lock:
        return _of_process[0] if len(_of_process) == 1 else None


def is_ranks_thread() -> bool:
    """Return whether a rank's operations belong to the calling thread."""
    context = current_or_none()
    return context is None or context.is_ranks_thread()


@contextlib.contextmanager
def zero_is_source() -> Iterator[None]:
    """Send broadcasts of rank 0 from the source instead, for the length of a ``with`` block.

    Horovod's scripts synchronise from rank 0. Here that rank can be a commit behind, if it has
    failed to commit where another has not.
    """
    context = current_or_none()
    if context is None:
        yield
        return
    context.rank_0_stands_for = context.source
    try:
        yield
    finally:
        context.rank_0_stands_for = 0


@contextlib.contextmanager
def activate(context: Context) -> Iterator[None]:
    """Make `context` that of the calling thread, for the length of a ``with`` block."""
    own = [context]
    token = _of_thread.set(own)
    context.home = threading.current_thread()
    with _lock:
        _of_process.append(context)
    try:
        yield
    finally:
        with _lock:
            _of_process.remove(context)
        _of_thread.reset(token)
        own.clear()


class Acting:
    """Make the calling thread act for a rank, whose own thread waits for it meanwhile.

    So do libraries that call back from compiled functions. It is no generator, because
    ``contextlib`` sets the traceback of exceptions, which some refuse.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token = _of_thread.set([self._context])
        self._caller = self._context._caller
        self._context._caller = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._context._caller = self._caller
        _of_thread.reset(self._token)


def initialize() -> None:
    """Initialize ranks and sizes: the job's, or outside a job a world of one rank."""
    known = current_or_none()
    if known is not None:
        known.is_shut_down = False
    else:
        context = Context()
        _of_thread.set([context])
        with _lock:
            _of_process.append(context)


def shutdown() -> None:
    """Undo ``init()``, until it is called again; process sets are gone.

    A rank stays a member of its job, whose generations begin and end with those of the others.
    """
    known = current_or_none()
    if known is not None:
        known.is_shut_down = True
        for end in at_shutdown:
            end(known)
    own = _of_thread.get([])
    if own and type(own[0]) is Context:
        with _lock:
            if own[0] in _of_process:
                _of_process.remove(own[0])
        _of_thread.set([])


# -- rank and size of the calling rank, with Horovod's names ------------------------------------


def is_initialized() -> bool:
    """Return whether the calling thread is a rank."""
    context = current_or_none()
    return context is not None and not context.is_shut_down


def _initialized() -> Context:
    context = current()
    if context.is_shut_down:
        raise NotInitialized("call init() again after shutdown() before using ranks")
    return context


def rank() -> int:
    """Return this rank's position in the job, from 0; before the first generation, a forecast."""
    return _initialized().rank


def size() -> int:
    """Return the number of ranks in the job; before the first generation, a forecast."""
    return _initialized().size


def local_rank() -> int:
    """Return this rank's position among those on its host, from 0."""
    return _initialized().local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return _initialized().local_size


def cross_rank() -> int:
    """Return this host's position among the hosts that have this local rank."""
    return _initialized().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have this local rank."""
    return _initialized().cross_size
