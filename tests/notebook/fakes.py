"""A job, a shell and a stage for displays without a cluster: the test sets all that they say."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import cloudpickle

from nbelastic.cluster import Returned
from nbelastic.driver.status import HistoryEvent, JobStatus, Output, RankStatus
from nbelastic.errors import RankFailed
from nbelastic.notebook.display_service import AFTER, DisplayGroup, DisplayService
from tests.support import clusters

STARTED = 1_000_000.0


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
            job_client=SimpleNamespace(is_local=not self.elsewhere),
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


def run(shell, source, *, fails=False):
    """Run a cell; return its result, or with `fails` what it raised."""
    result = shell.run_cell(source, store_history=True)
    if not fails:
        result.raise_error()
        return result
    return result.error_before_exec or result.error_in_exec


class RunJob(FakeJob):
    """A job whose function runs when somebody waits for it."""

    def __init__(self, fit, function, name, started):
        super().__init__(name=name)
        self.started = started
        self.waited = False
        self._fit = fit
        self._function = cloudpickle.dumps(function)

    def wait_interruptibly(self):
        self.waited = True
        self._fit.while_waiting()

    def result(self, timeout=None):
        if self._fit.error is not None:
            raise self._fit.error
        return cloudpickle.loads(self._function)()


class FakeFit:
    """Stands in for ``nbelastic.fit``."""

    def __init__(self):
        self.calls = 0
        self.error = None
        self.refuses = None
        self.while_waiting = lambda: None

    def __call__(self, function, **options):
        if self.refuses is not None:
            raise self.refuses
        self.calls += 1
        self.function, self.options = function, options
        self.job = RunJob(self, function, options["name"], float(self.calls))
        return self.job


LINE = "nbelastic job quickstart: finished · 4 ranks · 2 resets · 120 commits"


class Screen:
    """Keeps the latest of every display, and counts."""

    def __init__(self) -> None:
        self.displays: dict[str, dict] = {}
        self.updates: list[dict] = []
        self.after: dict[str, str] = {}  # the lines under widgets
        self.makers: list[threading.Thread] = []

    def publish(self, data, display_id, *, update=False):
        if display_id.endswith(AFTER):
            assert (display_id in self.after) == update
            self.after[display_id] = data["text/html"]
            return
        assert (display_id in self.displays) == update
        self.displays[display_id] = data
        if update:
            self.updates.append(data)
        else:
            self.makers.append(threading.current_thread())

    @property
    def shown(self) -> list[dict]:
        return list(self.displays.values())


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """A display without a kernel, whose time and cell the test sets."""

    def __init__(self) -> None:
        self.screen, self.clock = Screen(), Clock()
        self.shell = SimpleNamespace(kernel=object(), execution_count=1)
        self.display = DisplayService(self.screen.publish, lambda: self.shell, self.clock)

    def groups(self) -> list[DisplayGroup]:
        return [each.group for each in self.display._shown.values() if each.group is not None]


def until(condition) -> None:
    clusters.until(condition, "what is displayed", 10)
