"""Keep records of workers, and send messages to their agents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler

from nbelastic import messages as m
from nbelastic.cluster.wire import PLUGIN

RANK_KEY = "nbelastic-rank-"  # how the keys of ranks' tasks begin


@dataclass(eq=False)
class WorkerRecord:
    """A worker with an agent."""

    slot: m.Slot
    versions: dict[str, str]  # what it runs
    pid: int
    nanny: str | None = None
    holder: tuple[str, int] | None = None  # job and start that its slot is given to
    has_beaten: bool = False  # since its slot was given to that
    silence: float = 0.0  # seconds without a heartbeat, in which it had a rank and we listened
    last_beats: dict[tuple[str, int], m.Beat] = field(default_factory=dict)  # by job and start
    retiring: bool = False  # about to be retired, or to close: nothing revokes that
    # In force, by source and softness; their `seconds` are moments of the event loop's clock.
    notices: dict[tuple[m.NoticeSource, bool], m.Notice] = field(default_factory=dict)
    retire_at: float = 0.0  # with a notice it is retired then, whatever its rank does
    frozen: bool = False  # the job of its rank was told that it is silent
    watch: m.WatchOrder = field(default_factory=m.WatchOrder)  # as last sent to it

    @property
    def leaving(self) -> bool:
        """Whether it was asked to leave."""
        return self.retiring or self.ends

    @property
    def notice(self) -> m.Notice | None:
        """The worker's most urgent notice; a notice of mere risk counts last."""
        values = self.notices.values()
        return min(values, key=lambda each: (each.soft, each.seconds), default=None)

    @property
    def ends(self) -> bool:
        """Whether its machine or its batch job will end."""
        return self.notice is not None and not self.notice.soft

    @property
    def at_risk(self) -> bool:
        """Whether ranks should leave the worker for a replacement."""
        return self.notice is not None and self.notice.soft and not self.retiring

    @property
    def address(self) -> str:
        """The worker's address, as the scheduler has it."""
        return self.slot.worker


def tell_agent(scheduler: Scheduler, worker: WorkerRecord, message: dict[str, Any]) -> None:
    """Send a packed message to a worker's agent."""
    if worker.address in scheduler.stream_comms:
        scheduler.worker_send(worker.address, {"op": PLUGIN, "message": message})
