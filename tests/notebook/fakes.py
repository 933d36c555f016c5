"""A job, a shell and a stage for displays without a cluster: the test sets all that they say."""

from __future__ import annotations

import dataclasses
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import cloudpickle

from nbelastic.cluster import Returned
from nbelastic.errors import RankFailed
from nbelastic.notebook.display_service import DisplayGroup, DisplayService
from nbelastic.render import JobSnapshot
from nbelastic.status import HistoryEvent, JobStatus, Output, Progress, RankStatus
from tests.support import clusters

STARTED = 1_000_000.0


def rank_status(rank: int | None, *, state: str = "running", step: int = 10) -> RankStatus:
    number = 99 if rank is None else rank
    return RankStatus(
        rank, f"tcp://10.0.0.{number}:4{number:04d}", f"node-{number // 4}", state, step, step,
        samples_per_s=250.0, device="cuda:0",
    )  # fmt: skip


def job_status(**changes: Any) -> JobStatus:
    ranks = tuple(rank_status(i) for i in range(4))
    status = JobStatus("quickstart", "running", 2, 4, 2, 8, 2, 120, 42.0, "", ranks, 1000.0)
    return dataclasses.replace(status, **changes)


def event(kind: str, at: float, *, rank: int | None = None, detail: str = "", **more: Any) -> Any:
    where = "tcp://10.0.0.1:40001"
    return HistoryEvent(STARTED + at, kind, where, rank, 1, detail, **more)


def full(**changes: Any) -> JobSnapshot:
    """Return a job that has lost a rank, with all that a page can show."""
    history = (
        event("joined", 1, size=0, rank=0),
        event("formed", 2, size=4),
        event("lost", 20, size=3, rank=3, detail="its worker was killed", name="w3"),
        event("reset", 20.1, size=3, detail="rank 3 lost → 3 ranks"),
    )
    progress = Progress(1, 4, 5, 10, remaining_s=75.0)
    return JobSnapshot(
        job_status(progress=progress, **changes),
        history,
        STARTED,
        {"loss": [(0.0, 2.0), (1.0, 0.5)]},
        ((1.0, 100.0), (2.0, 200.0)),
    )


class FakeJob:
    """Says what it is told to say, and notes what it is asked."""

    def __init__(self, elsewhere: bool = True, **changes: Any) -> None:
        self.status = job_status(**changes)
        self.history: tuple[HistoryEvent, ...] = ()
        self.started = STARTED
        self.asked: list[Any] = []
        self.printed: list[Output] = []
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self._over = threading.Event()
        metrics = SimpleNamespace(curves=lambda most: self.curves, pace=tuple)
        printed = SimpleNamespace(last=self._last)
        log = SimpleNamespace(metrics=metrics, printed=printed, returned=Returned(None, {}))
        client = SimpleNamespace(is_local=not elsewhere)  # whether its scheduler is
        self._driver = SimpleNamespace(job_client=client, log=log)

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

    def _last(self, rank: int, most: int) -> str:
        return "".join(each.text for each in self.printed if each.rank == rank)[-most:]

    def exception(self) -> Exception:
        return RankFailed(f"{self.status.reason}\nat line 3 of the cell")

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

    def scale(self, **limits: float) -> None:
        self.asked.append(limits)


def run(shell, source, *, fails=False):
    """Run a cell; return its result, or with `fails` what it raised."""
    result = shell.run_cell(source, store_history=True)
    if not fails:
        result.raise_error()
        return result
    return result.error_before_exec or result.error_in_exec


class FakeFit:
    """Stands in for ``nbelastic.fit``: a function runs when somebody waits for its job."""

    def __init__(self):
        self.calls = 0
        self.error = self.refuses = None
        self.while_waiting = lambda: None

    def __call__(self, function, **options):
        if self.refuses is not None:
            raise self.refuses
        self.calls += 1
        self.options, self.waited = options, False
        self.job = job = FakeJob(name=options["name"])
        job.started = float(self.calls)
        job.result = partial(self._result, cloudpickle.dumps(function))
        return job

    def wait_interruptibly(self, job):
        self.waited = True
        self.while_waiting()

    def _result(self, function):
        if self.error is not None:
            raise self.error
        return cloudpickle.loads(function)()


LINE = "nbelastic job quickstart: finished · 4 ranks · 2 resets · 120 commits"


class Screen:
    """Keeps the latest of every display, and counts."""

    def __init__(self) -> None:
        self.displays: dict[str, dict] = {}
        self.updates: list[dict] = []
        self.makers: list[threading.Thread] = []

    def publish(self, data, display_id, *, update=False):
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
    now = 100.0

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
