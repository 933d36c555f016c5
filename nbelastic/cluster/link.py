"""The kernel's end of a job: what the driver uses of Dask, and nothing else does."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import TYPE_CHECKING, Any

from nbelastic.errors import ClusterLost, OptionError

from .haste import hasten
from .plugin import ElasticPlugin
from .protocol import Message
from .rank import run_rank
from .records import RANK_KEY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distributed import Client, Future

__all__ = ["Link", "open_jobs"]

CLOSE_TIMEOUT = 2.0
"""Seconds to wait for the last message of a job, once it has been closed."""

PATIENCE = 10.0
"""Seconds for which a call is made again when the connection was lost meanwhile.

The calls and the client's stream notice that at different times.
"""

DRIVES_TIMEOUT = 30.0
"""Seconds to wait for a scheduler that may merely stand still, before a job ends without it."""

POLL = 0.05
"""Seconds between two looks whether the connection is back."""

RPC_TIMEOUT = 10.0
"""Seconds to wait for the scheduler's answer."""

logger = logging.getLogger(__name__)


class Link:
    """Connects one job's driver to a cluster.

    Messages from the cluster arrive by ``receive(message)`` in the thread of the client's event
    loop; all methods may be called from any other thread. What must wait does so by
    ``client.sync``, and never without limit.
    """

    def __init__(self, client: Client, job: str, receive: Callable[[Message], None]) -> None:
        self._client = client
        self._job = job
        self._uid = uuid.uuid4().hex[:8]
        self._topic = f"nbelastic-{job}-{self._uid}"
        self._receive = receive
        self._futures: dict[int, Future[None]] = {}
        self._over: asyncio.Event | None = None
        self._steps = 0
        self._installed = False
        self.epoch = 0

    def open(self, payload: bytes, spec: dict[str, Any]) -> None:
        """Publish the job on the cluster. From here on messages arrive.

        Raises
        ------
        OptionError
            There is a job of this name already.
        ClusterLost
            The connection was lost meanwhile.
        """
        self._subscribe()
        hasten(getattr(self._client, "scheduler_comm", None))
        self.epoch = 1
        problem = self._client.sync(
            self._scheduler.nbelastic_open,
            job=self._job,
            client=self._client.id,
            topic=self._topic,
            payload=payload,
            spec={**spec, "uid": self._uid},
        )
        if problem:
            self.detach()
        if problem == "gone":
            raise ClusterLost("the connection to the scheduler was lost while the job was opened")
        if problem:
            raise OptionError(
                f"name={self._job!r}: a job of this name is on this cluster already; "
                "attach to it, or choose another name"
            )

    def attach(self) -> dict[str, Any]:
        """Take the job over: for the first time, or again after the connection was lost.

        Returns
        -------
        dict
            All that a driver needs to know, or why the job cannot be had, under ``problem``:
            ``unknown`` on this cluster, or ``taken`` by another driver meanwhile.

        Raises
        ------
        ClusterLost
            The scheduler does not answer. Try again, or :meth:`give_up`.
        """
        again = self.epoch > 0
        hasten(getattr(self._client, "scheduler_comm", None))
        if not again:
            self._subscribe()
        try:
            packed: dict[str, Any] = self._client.sync(
                self._scheduler.nbelastic_attach,
                job=self._job,
                client=self._client.id,
                topic=self._topic,
                again=again,
                callback_timeout=RPC_TIMEOUT,
            )
        except (OSError, asyncio.TimeoutError, TimeoutError) as error:
            raise ClusterLost(f"job {self._job!r}: the scheduler does not answer") from error
        if "problem" in packed:
            self.detach()
        else:
            self.epoch, self._steps = packed["epoch"], 0
            self._uid = packed["uid"]
        return packed

    def drives(self) -> bool:
        """Return whether the job is still this driver's, or that cannot be told."""
        try:
            return bool(self._client.sync(self._persist, self._drives))
        except (OSError, asyncio.TimeoutError, TimeoutError):
            return True

    async def _drives(self) -> bool:
        call = self._scheduler.nbelastic_drives(
            job=self._job, client=self._client.id, epoch=self.epoch
        )
        return bool(await asyncio.wait_for(call, DRIVES_TIMEOUT))

    def close(self) -> None:
        """Take the job off the cluster, and wait until its workers are free.

        What is left of it there is told to end. The wait is bounded, also while the connection is
        lost: the client gives it up in time. The topic is given up last, after the message that no
        further one follows.
        """
        if self._installed and self._client.status in ("running", "connecting"):
            try:
                self._client.sync(self._persist, self._close)
                self.detach()
                return
            except (asyncio.TimeoutError, TimeoutError):
                logger.info("the cluster was slow to take note of the end of job %r", self._job)
            except OSError:
                logger.info("the connection was lost while job %r was closed", self._job)
        self.give_up(over=True)

    async def _close(self) -> None:
        await asyncio.wait_for(self._close_now(), 2 * RPC_TIMEOUT)

    async def _persist(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Call again when the connection was lost meanwhile."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE
        while True:
            await self._connected()
            try:
                return await call()
            except (asyncio.TimeoutError, TimeoutError):  # an OSError too, from Python 3.11 on
                raise
            except OSError:
                if loop.time() > deadline:
                    raise
            await asyncio.sleep(POLL)

    async def _connected(self) -> None:
        """Wait until the connection is back, or the client gives it up."""
        while self._client.status == "connecting":
            await asyncio.sleep(POLL)
        if self._client.status != "running":
            raise OSError("the client has given its scheduler up")

    async def _close_now(self) -> None:
        over = self._over = asyncio.Event()
        await self._scheduler.nbelastic_close(
            job=self._job, uid=self._uid, epoch=self.epoch, steps=self._steps
        )
        try:
            await asyncio.wait_for(over.wait(), CLOSE_TIMEOUT)
        except asyncio.TimeoutError:
            logger.info("the last message of job %r has not come", self._job)

    def give_up(self, *, over: bool = False) -> None:
        """Have nothing to do with a job of which it is not known whether it was opened, or had.

        The scheduler may still be about to open it, or to hand it over: then it will not. If the
        job is `over`, it is closed there as soon as this arrives.
        """
        if self._installed and self._client.status in ("running", "connecting"):
            message = {"op": "nbelastic-give-up", "topic": self._topic, "over": over}
            self._client._send_to_scheduler(message)
        self.detach()

    def detach(self) -> None:
        """Have nothing to do with the job any more; it is left as it is."""
        for start in list(self._futures):
            self.forget(start)
        handlers = self._client._event_handlers
        if self._topic in handlers:
            if self._client.status == "running":
                self._client.unsubscribe_topic(self._topic)
            handlers.pop(self._topic, None)

    def _subscribe(self) -> None:
        self._client.register_plugin(ElasticPlugin())
        self._installed = True
        self._client.subscribe_topic(self._topic, self._take)

    def _take(self, event: tuple[float, Message]) -> None:
        message = event[1]
        if message["do"] != "closed":
            self._receive(message)
        elif self._over is not None:
            self._over.set()

    @property
    def _scheduler(self) -> Any:
        return self._client.scheduler

    @property
    def status(self) -> str:
        """The client's: ``running``, ``connecting`` while it has lost the scheduler, or others."""
        return str(self._client.status)

    # -- orders --------------------------------------------------------------------------------

    def step(self, now: float, chance: float, seq: int, event: Message | None) -> None:
        """Say what was decided next: which event happened, and when.

        Parameters
        ----------
        now, chance : float
            What the machine was handed with it.
        seq : int
            Number of the event, if it came from the cluster.
        event : dict or None
            The event itself, if not.
        """
        self._steps += 1
        fields = {"now": now, "chance": chance, "seq": seq, "event": event}
        self._send("nbelastic-step", topic=self._topic, number=self._steps, **fields)

    def order(self, do: str, **fields: Any) -> None:
        """Send ranks something that has nothing to do with membership."""
        self._send("nbelastic-order", do=do, **fields)

    def _send(self, op: str, **fields: Any) -> None:
        if self._client.status in ("running", "connecting"):
            self._client._send_to_scheduler(
                {"op": op, "job": self._job, "epoch": self.epoch, **fields}
            )

    def submit(
        self,
        start: int,
        slot: dict[str, str],
        place: dict[str, int],
        *,
        resources: dict[str, float],
        operation_timeout_s: float,
        backend: str = "auto",
        checkpoint: dict[str, Any] | None = None,
        state_bytes: int | None = None,
    ) -> None:
        """Start a rank on a slot that was granted: a task pinned to its worker."""
        self._futures[start] = self._client.submit(
            run_rank,
            self._job,
            start,
            slot["id"],
            place,
            operation_timeout_s,
            backend,
            None if checkpoint is None else {**checkpoint, "run": self._uid},
            state_bytes,
            key=f"{RANK_KEY}{self._uid}-{start}",
            workers=[slot["worker"]],
            allow_other_workers=False,
            resources=resources or None,
            pure=False,
            retries=0,
        )

    def forget(self, start: int) -> None:
        """Let go of a rank's task; the scheduler plugin does so too when the rank is gone."""
        future = self._futures.pop(start, None)
        if future is not None:
            future.release()


def open_jobs(client: Client) -> list[dict[str, Any]]:
    """Return what there is to know of each job on a cluster."""
    client.register_plugin(ElasticPlugin())
    scheduler: Any = client.scheduler
    found: list[dict[str, Any]] = client.sync(
        scheduler.nbelastic_jobs, callback_timeout=RPC_TIMEOUT
    )
    return found
