"""A job without a cluster: everything that it says is set by the test."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from nbelastic.cluster import Returned
from nbelastic.driver.status import HistoryEvent, JobStatus, RankStatus
from nbelastic.errors import RankFailed

STARTED = 1_000_000.0


@dataclass(frozen=True)
class Output:
    """What a rank printed."""

    start: int
    rank: int | None
    text: str


def rank_status(rank: int | None, *, state: str = "running", step: int = 10) -> RankStatus:
    number = 99 if rank is None else rank
    return RankStatus(
        rank, f"tcp://10.0.0.{number}:4{number:04d}", f"node-{number // 4}", state, step, step,
        samples_per_s=250.0, device="cuda:0",
    )  # fmt: skip


def job_status(**changes: Any) -> JobStatus:
    known: dict[str, Any] = {
        "name": "quickstart",
        "state": "running",
        "generation": 2,
        "size": 4,
        "min_np": 2,
        "max_np": 8,
        "resets": 2,
        "commits": 120,
        "elapsed": 42.0,
        "reason": "",
        "ranks": tuple(rank_status(i) for i in range(4)),
        "samples_per_s": 1000.0,
    }
    return JobStatus(**(known | changes))


def event(
    kind: str,
    at: float,
    *,
    size: int = 0,
    rank: int | None = None,
    detail: str = "",
    name: str = "",
    figures: dict[str, float] | None = None,
) -> Any:
    where = "tcp://10.0.0.1:40001"
    return HistoryEvent(STARTED + at, kind, where, rank, 1, detail, size, name, figures or {})


class FakeJob:
    """Says what it is told to say, and notes what it is asked."""

    def __init__(self, elsewhere: bool = True, **changes: Any) -> None:
        self.elsewhere = elsewhere  # whether its scheduler is
        self.status = job_status(**changes)
        self.history: tuple[HistoryEvent, ...] = ()
        self.started = STARTED
        self.metrics: list[dict[str, float]] = []
        self.asked: list[Any] = []
        self.printed: list[Output] = []
        self.shapes: dict[str, list[tuple[float, float]]] = {}
        self.speeds: tuple[tuple[float, float], ...] = ()
        self._over = threading.Event()

    @property
    def name(self) -> str:
        return self.status.name

    def set(self, **changes: Any) -> None:
        self.status = dataclasses.replace(self.status, **changes)

    def happens(self, kind: str, at: float = 1.0, **rest: Any) -> None:
        self.history = (*self.history, event(kind, at, **rest))

    def prints(self, text: str, rank: int | None = 0) -> None:
        self.printed.append(Output(rank or 0, rank, text))

    def end(self, state: str = "finished", **changes: Any) -> None:
        self.set(state=state, **changes)
        self._over.set()

    @property
    def _driver(self) -> Any:  # its log's metrics are the job's own
        return SimpleNamespace(
            outlives_kernel=self.elsewhere,
            log=SimpleNamespace(
                metrics=self, last_output=self.last_output, returned=Returned(None, {})
            ),
        )

    def last_output(self, most: int) -> str:
        return "".join(each.text for each in self.printed if each.rank == 0)[-most:]

    def exception(self) -> Exception:
        return RankFailed(f"{self.status.reason}\nat line 3 of the cell")

    def curves(self, most: int) -> dict[str, list[tuple[float, float]]]:
        return self.shapes

    def pace(self) -> tuple[tuple[float, float], ...]:
        return self.speeds

    def output(self, since: int = 0) -> tuple[int, tuple[Output, ...]]:
        return len(self.printed), tuple(self.printed[since:])

    def wait(self, timeout: float | None = None) -> bool:
        return self._over.wait(timeout)

    def done(self) -> bool:
        return self._over.is_set()

    def stop(self) -> None:
        self.asked.append("stop")

    def cancel(self) -> bool:
        self.asked.append("cancel")
        return True

    def scale(
        self, *, min_np: int | None = None, max_np: int | None = None, **place: float
    ) -> None:
        self.asked.append((min_np, max_np, place) if place else (min_np, max_np))
