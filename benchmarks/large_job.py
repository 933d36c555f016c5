"""Cost of a job of 200 ranks for the kernel: driver and live panel, as a share of a core.

The ranks are simulated: the scheduler's messages, with heartbeats and telemetry twice a second and
a report per step. The parts in the kernel are real: the membership machine in its thread, the
metrics, a panel that refreshes four times a second, messages packed and signed. Prints the share
of a core over 20 seconds. Exits with 1 above 5 %.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import comm

from benchmarks.panel import LIMIT, PER_SECOND, RANKS, Wire
from nbelastic.cluster.wire import pack, unpack
from nbelastic.driver.job import Job
from nbelastic.driver.options import Options
from nbelastic.driver.thread import Driver
from nbelastic.messages import (
    Beat,
    Beats,
    JobEvent,
    Message,
    MetricsReport,
    Place,
    RankFormed,
    RankReady,
    RankTelemetry,
    Slot,
    SlotGranted,
    SlotsFound,
    TelemetryBatch,
    ToDriver,
)

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.runtime import RankSpec

SECONDS = 20
STEPS_PER_SECOND = 10


class SimulatedJobClient:
    """The cluster: ranks that follow the driver's plans."""

    status = "running"
    epoch = 1
    uid = "uid"
    is_local = False

    def __init__(self) -> None:
        self.driver: Driver | None = None
        self.members: list[int] = []
        self.granted: set[int] = set()
        self.packing = 0.0  # seconds of the scheduler's work, which is no part of the kernel's
        self._seq = 0

    def tell(self, message: Message) -> None:
        """Hand a message to the driver, read as it comes from the wire."""
        assert self.driver is not None
        began = time.thread_time()
        packed = pack(ToDriver(self.epoch, message))
        self.packing += time.thread_time() - began
        self.driver.receive(unpack(packed, ToDriver))

    def say(self, event: Any) -> None:
        self._seq += 1
        self.tell(JobEvent(self._seq, event))

    def step(self, *_: Any) -> None:
        """Carry out what the driver's machine has just decided, as the scheduler's copy would."""
        assert self.driver is not None
        roster = self.driver._machine.roster
        for start in sorted(roster.ranks.keys() - self.granted):
            self.granted.add(start)
            self.tell(SlotGranted(start, roster.ranks[start].slot, Place(0, 1, 0, 1, 0, 1)))
        if roster.plan is not None and not self.members:
            self.members = [member.start for member in roster.plan.members]
            for start in self.members:
                self.say(RankFormed(start, roster.plan.generation))

    def submit(self, spec: RankSpec, *_: Any) -> None:
        start = spec.start
        self.say(RankReady(start, 0, -1, 1, ("10.0.0.1", 4000 + start), False, ""))

    def drives(self) -> bool:
        return True

    def forget(self, start: int) -> None:
        pass

    def close(self) -> None:
        pass

    def beat(self, beat: int, rows: int = 5) -> None:
        """Send the messages of all ranks for half a second, one interval of heartbeats."""
        step = beat * STEPS_PER_SECOND // 2
        self.say(Beats(tuple(Beat(s, 1, step << 32, False, step) for s in self.members)))
        reports = tuple(
            MetricsReport(step + i, 0, 1, None, {"loss": 1.0 / (step + i + 1)}) for i in range(rows)
        )
        figures = (step, 32 * step, "cuda:0", 0, step, 9, 900)
        ranks = (RankTelemetry("large", start, *figures, reports=reports) for start in self.members)
        self.tell(TelemetryBatch(tuple(ranks)))


def slots_of(count: int) -> tuple[Slot, ...]:
    """Return so many slots, four on each host."""
    return tuple(
        Slot(f"worker-{i}", f"tcp://10.0.{i // 200}.{i % 200}:40001", f"w{i}", f"node-{i // 4}")
        for i in range(count)
    )


def main() -> int:
    comm.create_comm = Wire
    from nbelastic.notebook.panel import Panel

    job_client = SimulatedJobClient()
    driver = Driver("large", Options(np=RANKS, min_np=100), lambda: None)
    job_client.driver = driver
    driver.start(job_client)  # type: ignore[arg-type]
    job_client.say(SlotsFound(slots_of(RANKS)))
    job = Job(driver)
    panel = Panel(job)
    pause = threading.Event()
    while job.status.state != "running":
        pause.wait(0.05)
    before, began = time.process_time() - job_client.packing, time.monotonic()
    for update in range(SECONDS * PER_SECOND):
        if update % 2 == 0:
            job_client.beat(update // 2 + 1)
        panel.refresh()
        pause.wait(max(0.0, began + (update + 1) / PER_SECOND - time.monotonic()))
    share = (time.process_time() - job_client.packing - before) / (time.monotonic() - began)
    size, rows = job.status.size, len(job.metrics)
    job.cancel()
    if size != RANKS or rows < SECONDS * STEPS_PER_SECOND // 2:
        print(f"the simulation went wrong: {job.status.state}, {size} ranks, {rows} rows")
        return 1
    print(f"{share:.2%} of a core for a job of {RANKS} ranks (limit {LIMIT:.0%})")
    return 0 if share <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
