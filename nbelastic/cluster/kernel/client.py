"""Connect one job's driver to a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from nbelastic import messages as m
from nbelastic.cluster.dask_compat import hold_nothing_back, runs_here
from nbelastic.cluster.scheduler.plugin import ElasticPlugin
from nbelastic.cluster.scheduler.records import RANK_KEY
from nbelastic.cluster.wire import FROM_KERNELS, pack, unpack
from nbelastic.cluster.worker.agent import run_rank
from nbelastic.errors import ClusterLost, NbelasticError, OptionError
from nbelastic.status import JobInfo

if TYPE_CHECKING:
    from distributed import Client, Future

    from nbelastic.elastic.ranks.runtime import RankSpec

CLOSE_TIMEOUT = 2.0  # seconds to wait for the last message of a job, once it has been closed

# Calls and the client's stream notice a lost connection at different times.
PATIENCE = 10.0  # seconds for which a call is made again when the connection was lost meanwhile

DRIVES_TIMEOUT = 30.0  # the same, before a job ends without a scheduler that may just be stopped
POLL = 0.05  # seconds between two checks whether the connection is back
RPC_TIMEOUT = 10.0  # seconds to wait for the scheduler's answer
BROKEN = (OSError, asyncio.TimeoutError)  # where a connection breaks, or no answer comes

logger = logging.getLogger(__name__)


class JobClient:
    """Connects one job's driver to a cluster.

    Messages arrive by ``receive(message)`` in the thread of the client's event loop; all methods
    may be called from any other thread, and wait by ``client.sync``, never without limit.
    """

    def __init__(self, client: Client, job: str, receive: Callable[[m.ToDriver], None]) -> None:
        self._client = client
        self._job = job
        self.uid = uuid.uuid4().hex[:8]
        self._topic = f"nbelastic-{job}-{self.uid}"
        self._receive = receive
        self._futures: dict[int, Future[None]] = {}
        self._over: asyncio.Event | None = None
        self._steps = 0
        self._installed = False
        self.epoch = 0

    def open(self, terms: m.JobTerms) -> None:
        """Publish the job on the cluster. From here on messages arrive."""
        request = m.OpenRequest(self._job, self.uid, self._client.id, self._topic, terms)
        with lost_while(self._client, "the job was opened"):
            self._subscribe()
            hold_nothing_back(getattr(self._client, "scheduler_comm", None))
            self.epoch = 1
            problem = self._client.sync(self._scheduler.nbelastic_open, message=pack(request))
        if problem:
            self.detach()
        if problem == "gone":
            raise ClusterLost("the connection to the scheduler was lost while the job was opened")
        if problem:
            raise OptionError(
                f"name={self._job!r}: a job of this name is on this cluster already; "
                "attach to it, or choose another name"
            )

    def attach(self) -> m.JobHandover | m.AttachRefusal:
        """Take the job over, also again; after ClusterLost, try again, or :meth:`give_up`."""
        again = self.epoch > 0
        hold_nothing_back(getattr(self._client, "scheduler_comm", None))
        request = m.AttachRequest(self._job, self._client.id, self._topic, again)
        try:
            if not again:
                self._subscribe()
            ask = partial(self._scheduler.nbelastic_attach, message=pack(request))
            packed = self._client.sync(ask, callback_timeout=RPC_TIMEOUT)
        except BROKEN as error:
            raise ClusterLost(f"job {self._job!r}: the scheduler does not answer") from error
        answer: m.JobHandover | m.AttachRefusal = unpack(packed, m.JobHandover | m.AttachRefusal)
        if isinstance(answer, m.AttachRefusal) and answer.problem == "gone":
            raise ClusterLost(f"job {self._job!r}: the connection to the scheduler was lost")
        if isinstance(answer, m.JobHandover):
            self.epoch, self._steps, self.uid = answer.epoch, 0, answer.uid
        else:
            self.detach()
        return answer

    def drives(self) -> bool:
        """Return whether the job is still this driver's, or that cannot be known."""
        me = {"job": self._job, "client": self._client.id, "epoch": self.epoch}
        ask = partial(self._scheduler.nbelastic_drives, **me)
        try:
            return bool(self._client.sync(self._persist, ask, DRIVES_TIMEOUT))
        except BROKEN:
            return True

    def close(self) -> None:
        """Take the job off the cluster, and wait, not without limit, until its workers are free."""
        if self._installed and self._client.status in ("running", "connecting"):
            try:
                self._client.sync(self._persist, self._close, 2 * RPC_TIMEOUT)
                self.detach()
                return
            except BROKEN as error:
                logger.info(
                    "the scheduler has not confirmed that job %r ended: %r", self._job, error
                )
        self.give_up(over=True)

    async def _persist(self, call: Callable[[], Awaitable[Any]], limit: float) -> Any:
        """Call again when the connection was lost meanwhile; each call has `limit` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE
        while True:
            while self._client.status == "connecting":
                await asyncio.sleep(POLL)
            if self._client.status != "running":
                raise OSError("the client has given its scheduler up")
            try:
                return await asyncio.wait_for(call(), limit)
            except asyncio.TimeoutError:  # an OSError, too, from Python 3.11 on
                raise
            except OSError:
                if loop.time() > deadline:
                    raise
            await asyncio.sleep(POLL)

    async def _close(self) -> None:
        over = self._over = asyncio.Event()
        await self._scheduler.nbelastic_close(
            job=self._job, uid=self.uid, epoch=self.epoch, steps=self._steps
        )
        try:
            await asyncio.wait_for(over.wait(), CLOSE_TIMEOUT)
        except asyncio.TimeoutError:
            logger.info("the last message of job %r has not come", self._job)

    def give_up(self, *, over: bool = False) -> None:
        """Abandon a pending open or attach request, and close a job that is `over`."""
        if self._installed and self._client.status in ("running", "connecting"):
            self._send(m.GiveUp(self._topic, over))
        self.detach()

    def detach(self) -> None:
        """Disconnect from the job, which goes on."""
        for start in list(self._futures):
            self.forget(start)
        self._client._event_handlers.pop(self._topic, None)

    def _subscribe(self) -> None:
        """Install the plugin, and take its messages on the topic."""
        self._client.register_plugin(ElasticPlugin())
        self._installed = True
        # Not by subscribe_topic: the scheduler would keep the subscriber for ever.
        self._client._event_handlers[self._topic] = self._take

    def _take(self, event: tuple[float, Any]) -> None:
        message: m.ToDriver = unpack(event[1], m.ToDriver)
        if not isinstance(message.message, m.JobClosed):
            self._receive(message)
        elif self._over is not None:
            self._over.set()

    @property
    def _scheduler(self) -> Any:
        return self._client.scheduler

    @property
    def status(self) -> str:
        """Dask's status of the client: ``running``, ``connecting`` after a loss, or another."""
        return str(self._client.status)

    @property
    def is_local(self) -> bool:
        """Whether the scheduler runs in this process, and ends with it."""
        return runs_here(self._client)

    # -- orders --------------------------------------------------------------------------------

    def step(self, now: float, chance: float, seq: int, event: m.Event | None) -> None:
        """Send a step of the journal, a :class:`JournalStep`."""
        self._steps += 1
        head = (self._job, self._topic, self.epoch, self._steps)
        self._send(m.JournalStep(*head, now, chance, seq, event))

    def inject(
        self, starts: Iterable[int], faults: Iterable[m.FaultOrder] = (), drop: Iterable[int] = ()
    ) -> None:
        """Send faults to ranks."""
        order = m.InjectFaults(tuple(faults), tuple(drop))
        self._send(m.InjectRequest(self._job, self.epoch, tuple(sorted(starts)), order))

    def _send(self, message: m.Message) -> None:
        if self._client.status in ("running", "connecting"):
            self._client._send_to_scheduler({"op": FROM_KERNELS, "message": pack(message)})

    def submit(self, spec: RankSpec, slot: m.Slot, resources: dict[str, float]) -> None:
        """Start a rank on a slot that was granted: a task pinned to its worker."""
        key = f"{RANK_KEY}{self.uid}-{spec.start}"
        terms: Any = {"workers": [slot.worker], "resources": resources or None, "retries": 0}
        self._futures[spec.start] = self._client.submit(run_rank, spec, slot, key=key, **terms)

    def forget(self, start: int) -> None:
        """Release a rank's task; the scheduler plugin does so too when the rank is gone."""
        future = self._futures.pop(start, None)
        if future is not None:
            future.release()


def open_jobs(client: Client) -> tuple[JobInfo, ...]:
    """Return a summary of each job on a cluster."""
    packed = _ask(client, "its jobs were asked for", "jobs")
    found: tuple[JobInfo, ...] = unpack(packed, tuple[JobInfo, ...])
    return found


def look_at_job(client: Client, job: str) -> m.JobHandover | m.AttachRefusal:
    """Return the scheduler's description of a job, without taking it over."""
    packed = _ask(client, "a job was looked at", "look", job=job)
    found: m.JobHandover | m.AttachRefusal = unpack(packed, m.JobHandover | m.AttachRefusal)
    return found


def send_wish(
    client: Client, job: str, event: m.StopRequested | m.LimitsChanged
) -> m.AttachRefusal | None:
    """Send a user's event to a job, without taking it over; return the refusal, if any."""
    packed = _ask(client, "a job was asked to change", "wish", message=pack(m.JobWish(job, event)))
    refusal: m.AttachRefusal | None = None if packed is None else unpack(packed, m.AttachRefusal)
    return refusal


def _ask(client: Client, doing: str, handler: str, **values: Any) -> Any:
    """Return the answer of a handler of :class:`JobService`, which no driver is needed for."""
    with lost_while(client, doing):
        client.register_plugin(ElasticPlugin())
        call = getattr(client.scheduler, f"nbelastic_{handler}")
        return client.sync(call, callback_timeout=RPC_TIMEOUT, **values)


@contextlib.contextmanager
def lost_while(client: Client, doing: str) -> Iterator[None]:
    """Make a ``ClusterLost`` of whatever Dask raises when the scheduler is gone."""
    try:
        yield
    except NbelasticError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        if not isinstance(error, BROKEN) and client.status == "running":
            raise
        raise ClusterLost(
            f"the connection to the scheduler was lost while {doing}: "
            f"{error or type(error).__name__}; check that the scheduler runs"
        ) from error
