"""Owner of a communicator of NCCL: a thread to make and to end it.

NCCL blocks where a rank must not: ending a communicator takes a second, making one may take for
ever, and any call may hang with the network. So a thread owns each generation's communicator
(:mod:`nbelastic.collectives.owner`):

- *forming*: it makes the communicator and adds up ones, while the rank's thread waits for that, for
  an abort, or for the limit;
- *in use*: it sleeps, and the executor's thread begins operations and polls for their end;
- *ending*: it aborts the communicator, or finalizes it if it was closed in an orderly way. Tensors
  of an operation that has failed are kept until then;

A call that never returns leaves the thread, the communicator and the tensors behind. A process in
which a communicator has not formed in time does without NCCL in the next generations.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from nbelastic.collectives.gpu.device import Device, DeviceError
from nbelastic.collectives.owner import GroupOwner
from nbelastic.collectives.transport import Op

if TYPE_CHECKING:
    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.nccl.library import NcclLibrary
    from nbelastic.collectives.rendezvous.client import Rendezvous

logger = logging.getLogger(__name__)

FORMING_LIMIT_S = 30.0
"""Limit for making a communicator and its first sum; at most half of the driver's limit."""

FINALIZE_LIMIT_S = 5.0  # limit for what a peer has still to receive when the communicator is closed

IN_USE_LIMIT_S = 2.0
"""Limit for a call under way at an abort, which does not wait for it any longer."""

_NEVER = "NCCL has not formed its communicator"
_SPINS = 50
_POLL_S = 0.0001


class NcclGroup(GroupOwner):
    """A communicator of NCCL, for a generation. The abort signal ends it."""

    def __init__(
        self,
        library: NcclLibrary,
        device: Device,
        rendezvous: Rendezvous,
        abort_signal: AbortSignal,
    ) -> None:
        name = f"nbelastic-nccl-owner-{rendezvous.generation}-{rendezvous.rank}"
        super().__init__(name, abort_signal)
        self._library = library
        self._device = device
        self._its = rendezvous
        self._unique_id = b""
        # Before the driver breaks the generation: else each would try, and break, again.
        self.limit_s = min(FORMING_LIMIT_S, rendezvous.forming_s / 2)
        self._comm = 0
        self._in_use = threading.Lock()  # operations and the end overlap only if one hangs
        self._lent: list[object] = []
        self._problem: str | None = None  # why it was given up, while the generation goes on

    # -- in the rank's thread ----------------------------------------------------------------------

    def form(self, unique_id: bytes) -> str:
        """Make the communicator with all other ranks; return what has failed.

        Raises ``CollectiveError`` for an abort.
        """
        self._unique_id = unique_id
        if not self._start(self.limit_s):
            self.abort(
                f"{_NEVER} of generation {self._its.generation} within {self.limit_s:g} s, half of "
                "heartbeat_timeout"
            )
        self._abort_signal.check()
        return self._problem or ""

    def abort(self, reason: str) -> None:
        """End it, although the generation goes on."""
        self._problem = self._problem or reason  # later ones follow from the first
        self._leave()

    def give_up_with(self, problems: Sequence[str]) -> str:
        """End the communicator because of the ranks' `problems`, if any; return the cause.

        A rank that has waited in vain is no cause, unless there is no other: then this process does
        not try it again.
        """
        found = [f"rank {rank}: {each}" for rank, each in enumerate(problems) if each]
        causes = [each for each in found if _NEVER not in each]
        if not causes and self._problem is not None:
            _refusals.append(self._problem)
        cause = (causes or found)[0]
        self.abort(cause)
        return cause

    # -- in the executor's thread ------------------------------------------------------------------

    def begin(
        self, calls: Callable[[NcclLibrary, int, int], None], tensors: list[torch.Tensor]
    ) -> None:
        """Begin operations together, in the device's stream, and wait until all are queued.

        `calls` begins each, with ``(library, comm, stream)``. The tensors are kept until
        :meth:`wait_for` has succeeded, or the communicator has ended.
        """
        self._lent = [*tensors]
        with self._in_use:
            self._check()  # under the lock: the end may have come first
            with self._library.group():
                calls(self._library, self._comm, self._device.stream)
            self._until(lambda: not self._library.in_progress(self._comm), self._its.timeout_s)

    def wait_for(self, reached: Callable[[], bool]) -> None:
        """Wait for the end of begun operations. Raises for a failure or an abort."""

        def ended() -> bool:
            self._library.in_progress(self._comm)  # a failure is reported here, and nowhere else
            return reached()

        with self._in_use:
            self._until(ended, self._its.timeout_s)
        self._lent = []  # not after a failure: NCCL may still use it

    def _until(self, ready: Callable[[], bool], limit_s: float) -> None:
        """Poll, without the interpreter's lock for most of the time."""
        deadline = time.monotonic() + limit_s
        polls = 0
        while True:
            self._check()  # first: what has been aborted may have been freed
            if ready():
                return
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"an operation over NCCL has not ended within {limit_s:g} s; "
                    "another rank may not have called it"
                )
            polls += 1
            time.sleep(0.0 if polls < _SPINS else _POLL_S)  # short sums end within the spins

    def _check(self) -> None:
        """Raise if it is ending."""
        self._abort_signal.check()
        if self._problem is not None:
            raise DeviceError(self._problem)

    # -- the owner's thread ------------------------------------------------------------------------

    def _fail_to_form(self, error: Exception) -> None:
        self._problem = self._problem or str(error)  # which nothing reads after an abort

    def _take_down(self) -> None:
        try:
            self._end()
        except (DeviceError, RuntimeError) as error:
            logger.warning(
                "rank %d of generation %d: ending NCCL's communicator: %s",
                self._its.rank,
                self._its.generation,
                error,
            )
        self._lent = []

    def _form(self) -> None:
        its, library = self._its, self._library
        with self._device.using():  # NCCL takes the thread's current GPU
            self._comm = library.init(self._unique_id, its.rank, its.size)
            # The rank's thread gives up first, which ends this wait, too.
            self._until(lambda: not library.in_progress(self._comm), 2 * self.limit_s)
            # The first sum makes connections; so it is no step that waits for them.
            ones = torch.ones(1, device=self._device.kind)
            mark = self._device.mark()
            with self._device.after(mark):
                self.begin(lambda lib, *where: lib.allreduce(*where, ones, Op.SUM), [ones])
            end = self._device.end(mark)
            self.wait_for(lambda: self._device.reached(end))
            if ones.item() != its.size:
                raise DeviceError(f"a sum of ones over NCCL is {ones.item():g}, not {its.size}")

    def _end(self) -> None:
        free = self._in_use.acquire(timeout=IN_USE_LIMIT_S)  # a hung call must not bar the end
        try:
            orderly = free and self._abort_signal.orderly and self._problem is None
            if self._comm and not (orderly and self._finalized()):
                self._library.abort(self._comm)
        finally:
            if free:
                self._in_use.release()

    def _finalized(self) -> bool:
        """End the communicator after all operations have reached all ranks, within the limit."""
        deadline = time.monotonic() + FINALIZE_LIMIT_S
        with contextlib.suppress(DeviceError):
            self._library.finalize(self._comm)
            while self._library.in_progress(self._comm):
                if time.monotonic() > deadline:
                    return False  # a peer is late: an abort ends it
                time.sleep(0.001)
            self._library.destroy(self._comm)
            return True
        return False


_refusals: list[str] = []


def obstacle() -> str:
    """Return why this process does without NCCL from here on; empty if it need not."""
    return f"{_refusals[0]}; its process does not try it again" if _refusals else ""
