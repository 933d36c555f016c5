"""Owner of a Gloo group.

Gloo blocks in three places where a rank must not: connecting cannot be interrupted, operations
cannot be cancelled, and a group's destructor waits for both. So a thread owns the group
(:mod:`nbelastic.collectives.owner`):

- *forming*: it constructs the group;
- *in use*: it sleeps, and the rank's thread uses the group under ``use_lock``;
- *ending*: it cuts the connections, and drops the group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Store, Work

from nbelastic.collectives.gloo.sockets import addresses_of, cut_connections
from nbelastic.collectives.operations import (
    Operation,
    OrderedExecutor,
    QueuedOperation,
    first_sentence,
)
from nbelastic.collectives.owner import GroupOwner
from nbelastic.collectives.rendezvous.client import Rendezvous, RendezvousClient
from nbelastic.errors import CollectiveError, RanksDisagree

if TYPE_CHECKING:
    from nbelastic.collectives.abort_signal import AbortSignal


class GlooStore(Store):
    """A store for Gloo's constructor of a group, in the owner's thread.

    The constructor sets one key, this rank's address, then waits for those of the other ranks.
    `addresses`, by rank in Gloo's encoding, is empty until all ranks have arrived. `failure` is why
    the exchange failed, which Gloo's own exception hides. Any thread aborts the exchange.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__()
        self.addresses: list[bytes] = []
        self.failure: str | None = None
        self._client = RendezvousClient(rendezvous)
        self.abort = self._client.abort
        self._own = b""

    def set(self, _key: str, value: bytes) -> None:  # type: ignore[override]
        """Take this rank's address."""
        self._own = bytes(value)

    def wait(self, _keys: Sequence[str], _timeout: timedelta | None = None) -> None:
        """Wait for all ranks, for as long as the rendezvous allows."""
        if self.addresses:  # one exchange answers all of Gloo's waits
            return
        try:
            self.addresses = self._client.exchange(self._own)
        except CollectiveError as error:
            self.failure = str(error)
            raise

    def get(self, key: str) -> bytes:
        """Return the address of the rank that `key` ends in."""
        self.wait([key])
        return self.addresses[int(key.rpartition("/")[2])]


# Connecting to a peer that has just been at the rendezvous takes milliseconds, or fails for good.
# Gloo gives a connection five times its limit.
FORMING_LIMIT_S = 10.0

# Gloo never ends a message that is cut in the middle, except by its timeout: it fails operations
# that wait for messages not begun, and forgets the message under way and those that it comes to
# write too late. Between live ranks, a message under way arrives in less than this.
DRAIN_LIMIT_S = 0.25

# Longer than most small operations take.
_BRIEFLY = timedelta(milliseconds=2)

# Older versions keep the limit that they were made with for every operation.
_TIMEOUT_CAN_CHANGE = hasattr(ProcessGroupGloo, "set_timeout")


class GlooOperation(Operation):
    """A collective operation under way in Gloo."""

    def __init__(self, work: Work, use_lock: threading.Lock) -> None:
        self._work: Work | None = work
        self._use_lock = use_lock
        self._succeeded = False

    def done(self) -> bool:
        with self._use_lock:  # the owner may be taking the work away
            return self._work is None or self._work.is_completed()

    def failure(self) -> str | None:
        """Return the error message if it has failed."""
        try:
            if self.done():
                self._result()
        except CollectiveError as error:
            return str(error)
        return None

    def wait(self, abort_signal: AbortSignal) -> bool:
        # First briefly inside Gloo, which is fastest and needs one thread only. Then for a wakeup,
        # which comes from Gloo's callback or from an abort.
        if self._result(_BRIEFLY):
            return True
        with abort_signal.listen() as wakeup:
            with self._use_lock:
                # None if another thread, at its next operation, has seen the end of this one.
                if self._work is not None:
                    self._work.get_future().add_done_callback(lambda _: wakeup.put(True))
                else:
                    wakeup.put(self._succeeded)
            if not wakeup.get():
                return False
        return self._result()

    def detach(self) -> Work | None:
        """Return Gloo's handle and give it up. The caller holds the use lock."""
        work, self._work = self._work, None
        return work

    def _result(self, limit: timedelta | None = None) -> bool:
        """Return whether it has succeeded, within a limit if one is given; raise its failure."""
        with self._use_lock:
            if self._work is None:
                return self._succeeded
            try:
                # Without a limit only after its end, because the use lock is held meanwhile.
                self._work.wait() if limit is None else self._work.wait(limit)
            except RuntimeError as error:
                if limit is not None:
                    return False  # whatever it is, it is still there after the end
                raise CollectiveError(first_sentence(error)) from None
            self._work, self._succeeded = None, True  # while the group lives, it may go
            return True


class GlooGroupOwner(GroupOwner):
    """Owner of one Gloo group.

    Groups are connected in full, not lazily: up to a dozen ranks that takes about as long, and no
    connection has to be made in the middle of a step.

    The rank's thread must never drop the last reference to anything of Gloo's, because a destructor
    may wait for operations that are stuck. So it holds ``use_lock`` wherever it has a reference on
    its stack, for a moment only, and the owner takes the lock before it drops the group.
    """

    def __init__(self, rendezvous: Rendezvous, abort_signal: AbortSignal) -> None:
        super().__init__(f"nbelastic-gloo-{rendezvous.generation}-{rendezvous.rank}", abort_signal)
        self.use_lock = threading.Lock()
        self._rendezvous = rendezvous
        self._store = store = GlooStore(rendezvous)
        abort_signal.on_abort(lambda *_: store.abort())  # the signal keeps the store, not the group
        self._group: ProcessGroup | None = None
        # Operations that are under way, or have failed, even if their handles are dropped.
        self.under_way: set[GlooOperation | QueuedOperation] = set()
        self._executors: dict[str, OrderedExecutor] = {}

    @property
    def group(self) -> ProcessGroup:
        """The group, for use inside an expression, under ``use_lock``."""
        assert self._group is not None
        return self._group

    def operations(self) -> list[GlooOperation | QueuedOperation]:
        """Return the operations under way, or failed."""
        return list(self.under_way)  # in one step: two threads may begin operations and messages

    def executor(self, direction: str) -> OrderedExecutor:
        """Return the executor for messages of a direction, such as ``to-3``."""
        if direction not in self._executors:
            name = f"{self._name}-{direction}"
            self._executors[direction] = OrderedExecutor(name, self._rendezvous.timeout_s)
        return self._executors[direction]

    def form(self) -> None:
        """Wait until the owner's thread has formed the group, or for an abort.

        The rank's thread leaves at once on an abort. The owner's leaves when Gloo returns: at once
        while it waits at the rendezvous, within five times :data:`FORMING_LIMIT_S` while it
        connects to a peer that does not answer.
        """
        self._start()
        self._abort_signal.check()

    def cut_connections(self) -> int:
        """Cut the group's connections as a network failure would; return their number."""
        return cut_connections(addresses_of(self._store.addresses), self._rendezvous.rank)

    def _fail_to_form(self, error: Exception) -> None:
        cause = self._store.failure or first_sentence(error)
        self._abort_signal.abort(f"generation {self._rendezvous.generation} did not form: {cause}")

    def _form(self) -> None:
        its = self._rendezvous
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        limit = min(its.timeout_s, FORMING_LIMIT_S) if _TIMEOUT_CAN_CHANGE else its.timeout_s
        options._timeout = timedelta(seconds=limit)
        options._devices = [ProcessGroupGloo.create_device(hostname=its.bind, lazy_init=False)]
        group = ProcessGroupGloo(self._store, its.rank, its.size, options)
        self._group = cast("ProcessGroup", group)  # its stubs leave out the base class's methods

    def lift_limit(self) -> None:
        """Have operations wait for longer than forming may take."""
        with self.use_lock:
            self._abort_signal.check()
            if _TIMEOUT_CAN_CHANGE:
                self.group.set_timeout(timedelta(seconds=self._rendezvous.timeout_s))

    def _take_down(self) -> None:
        """End the group, after an abort: no operation begins under the use lock any more."""
        with self.use_lock:
            pass  # the rank's thread has left Gloo, and will see the abort when it returns
        if addresses_of(self._store.addresses) and not self._abort_signal.orderly:
            self._drain()
            if self._abort_signal.kind is RanksDisagree:
                time.sleep(DRAIN_LIMIT_S)  # the others hear of it, too, not of a closed connection
            self.cut_connections()
        for executor in self._executors.values():
            executor.join()  # a task under way is in a call of the group
        with self.use_lock:
            operations = [each for each in self.operations() if isinstance(each, GlooOperation)]
            works = [each.detach() for each in operations]
            group, self._group = self._group, None
        del works  # outside the lock, because destructors wait for stuck operations
        del group

    def _drain(self) -> None:
        """Let messages under way arrive. The peers do the same.

        An operation that failed has ended on this rank only. Its peers may be in the middle of it,
        writing to this rank.
        """
        end = time.monotonic() + DRAIN_LIMIT_S
        while time.monotonic() < end and not all(
            each.done() and each.failure() is None for each in self.operations()
        ):
            time.sleep(0.005)
