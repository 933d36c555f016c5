"""The kernel's end of a job: what the driver uses of Dask, and nothing else does."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from nbelastic.errors import ClusterLost, OptionError
from nbelastic.membership import pack_place, pack_plan

from .plugin import ElasticPlugin
from .protocol import Message
from .rank import run_rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Client, Future

    from nbelastic.membership import Place, Plan, Slot

__all__ = ["Link"]

CLOSE_TIMEOUT = 2.0
"""Seconds to wait for ranks' tasks, told to end, to be seen as ended by Dask."""

logger = logging.getLogger(__name__)


class Link:
    """Connects one job's driver to a cluster.

    Messages from the cluster arrive by ``receive(message)`` in the thread of the client's event
    loop; all methods may be called from any other thread.
    """

    def __init__(self, client: Client, job: str, receive: Callable[[Message], None]) -> None:
        self._client = client
        self._job = job
        self._topic = f"nbelastic-{job}-{uuid.uuid4().hex[:8]}"
        self._receive = receive
        self._futures: dict[int, Future[None]] = {}
        self._closed = threading.Event()

    def open(self, payload: bytes, spec: dict[str, Any]) -> None:
        """Publish the job on the cluster. From here on messages arrive."""
        self._client.register_plugin(ElasticPlugin())
        self._client.subscribe_topic(self._topic, self._take)
        scheduler: Any = self._client.scheduler
        problem = self._client.sync(
            scheduler.nbelastic_open,
            job=self._job,
            client=self._client.id,
            payload=payload,
            spec={**spec, "topic": self._topic},
        )
        if problem:
            self._unsubscribe()
            raise OptionError(f"name={self._job!r}: {problem}; choose another name")

    def close(self) -> None:
        """Take the job off the cluster, and wait until its workers are free.

        What is left of it there is told to end. The wait is bounded. The topic is given up last,
        after the message that no further one follows.
        """
        if self._client.status == "running":
            scheduler: Any = self._client.scheduler
            try:
                self._client.sync(scheduler.nbelastic_close, job=self._job, callback_timeout=10)
                self._await_tasks()
                self._closed.wait(CLOSE_TIMEOUT)
            except (OSError, TimeoutError):
                logger.info("the cluster was slow to take note of the end of job %r", self._job)
        for start in list(self._futures):
            self.forget(start)
        self._unsubscribe()

    def _await_tasks(self) -> None:
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for future in self._futures.values():
            future.exception(timeout=max(deadline - time.monotonic(), 0.001))

    def _unsubscribe(self) -> None:
        handlers = self._client._event_handlers
        if self._topic in handlers:
            if self._client.status == "running":
                self._client.unsubscribe_topic(self._topic)
            handlers.pop(self._topic, None)

    def _take(self, event: tuple[float, Message]) -> None:
        message = event[1]
        if message["do"] == "closed":
            self._closed.set()
        else:
            self._receive(message)

    @property
    def status(self) -> str:
        """The client's: ``running``, or what else it is."""
        return str(self._client.status)

    def check(self) -> None:
        """Raise ClusterLost unless the client is connected."""
        if self.status != "running":
            raise ClusterLost(f"the Dask client is {self.status}, not running")

    # -- orders --------------------------------------------------------------------------------

    def order(self, do: str, **fields: Any) -> None:
        """Send an order to the scheduler plugin."""
        self._client._send_to_scheduler(
            {"op": "nbelastic-order", "job": self._job, "do": do, **fields}
        )

    def publish(self, plan: Plan) -> None:
        """Send a plan to its members."""
        starts = [member.start for member in plan.members]
        self.order("plan", starts=starts, plan=pack_plan(plan))

    def submit(
        self,
        start: int,
        slot: Slot,
        place: Place,
        *,
        resources: dict[str, float],
        operation_timeout_s: float,
    ) -> None:
        """Start a rank on a slot that was granted: a task pinned to its worker."""
        self._futures[start] = self._client.submit(
            run_rank,
            self._job,
            start,
            slot.id,
            pack_place(place),
            operation_timeout_s,
            key=f"{self._topic}-{start}",
            workers=[slot.worker],
            allow_other_workers=False,
            resources=resources or None,
            pure=False,
            retries=0,
        )

    def forget(self, start: int) -> None:
        """Let go of a rank's task: the scheduler then forgets it, whatever its state."""
        future = self._futures.pop(start, None)
        if future is not None:
            future.release()
