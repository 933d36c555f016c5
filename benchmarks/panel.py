"""Cost of the live panel of a job of 200 ranks for the kernel, as a share of a core.

Steps, speeds and times change between any two updates, which come four times a second. Every
changed trait is packed and signed as ipykernel does it. Prints the share. Exits with 1 above 5 %.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import comm

from nbelastic.status import HistoryEvent, JobStatus, Progress, RankStatus

RANKS = 200
UPDATES = 120
PER_SECOND = 4
LIMIT = 0.05


class Wire(comm.base_comm.BaseComm):
    """Packs and signs the messages that a kernel would send."""

    sent = 0

    def publish_msg(self, msg_type: str, data: Any = None, *_: Any, **__: Any) -> None:
        packed = json.dumps({"data": data, "type": msg_type}, default=str).encode()
        hmac.new(b"key", packed, hashlib.sha256).hexdigest()
        Wire.sent += len(packed)


class Job:
    """A job of 200 ranks in which all values change; it loses a worker every ten seconds."""

    name = "large"
    started = 0.0

    def __init__(self) -> None:
        self.history: tuple[HistoryEvent, ...] = ()
        self.status = JobStatus("large", "running", 1, RANKS, 100, 200, 0, 0, 0.0, "", ())
        self.speeds: tuple[tuple[float, float], ...] = ()
        self.shapes: dict[str, list[tuple[float, float]]] = {
            f"metric{i}": [(float(step), 1.0 / (step + 1)) for step in range(5_000)]
            for i in range(6)
        }

    def go_on(self, update: int) -> None:
        at = update / PER_SECOND
        if update % (10 * PER_SECOND) == 0:
            loss = HistoryEvent(at, "lost", "tcp://10.0.0.7:4000", 7, update, "killed", RANKS - 1)
            again = HistoryEvent(at, "reset", None, None, update, "7 lost → 199 ranks", RANKS)
            self.history = (*self.history, loss, again)
        self.speeds = (*self.speeds, (at, 5000.0 + update))
        for points in self.shapes.values():
            points.append((5_000.0 + update, 1.0 / (update + 1)))
        self.status = dataclasses.replace(
            self.status,
            elapsed=at,
            commits=update,
            progress=Progress(0, 10, update, UPDATES, 60.0),
            samples_per_s=5000.0 + update,
            ranks=tuple(
                RankStatus(
                    i,
                    f"tcp://10.0.{i // 50}.{i}:40001",
                    f"node-{i // 4}",
                    "running",
                    update,
                    update * 3 + i,
                    250.0 + i,
                    "cuda:0",
                )
                for i in range(RANKS)
            ),
        )

    @property
    def _driver(self) -> Any:
        """What a snapshot reads of a driver: the metrics of its log."""
        log = SimpleNamespace(metrics=self, printed=SimpleNamespace(last=lambda *_: ""))
        return SimpleNamespace(log=log, job_client=SimpleNamespace(is_local=False))

    def curves(self, most: int) -> dict[str, list[tuple[float, float]]]:
        return {name: points[:: -(-len(points) // most)] for name, points in self.shapes.items()}

    def pace(self) -> tuple[tuple[float, float], ...]:
        return self.speeds


def main() -> int:
    comm.create_comm = Wire
    from nbelastic.notebook.panel import Panel

    job = Job()
    job.go_on(0)
    now = 0.0
    panel = Panel(job, clock=lambda: now)
    spent = 0.0
    for update in range(1, UPDATES + 1):
        job.go_on(update)
        now = update / PER_SECOND
        began = time.process_time()
        panel.refresh()
        spent += time.process_time() - began
    share = spent / UPDATES * PER_SECOND
    kilobytes = Wire.sent / 1024 / UPDATES * PER_SECOND
    print(f"{share:.2%} of a core for {RANKS} ranks (limit {LIMIT:.0%}), {kilobytes:.0f} KB/s")
    return 0 if share <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
