"""One digest: on one rank in this process, on any number of ranks, under faults, resumed."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

import nbelastic.torch as hvd
from nbelastic import chaos
from nbelastic.data import balancer
from tests.support.clusters import sizes, until
from tests.support.exact_training import ExactTraining, one_thread, train_alone

ROWS, EPOCHS = 108, 4
SIZES = {"rows": ROWS, "batch": 16}
PATIENT = {"np": 4, "min_np": 1, "stall_timeout": 5, "heartbeat_timeout": 8, "block": False}


@dataclass(frozen=True)
class SameResult:
    """The training of this file; ranks keep the rows of micro-batches in files."""

    marks: Path
    seconds: float = 0.0  # of a step
    slow: int | None = None  # a rank that takes three times as long by the loader's clock
    hold: int | None = None  # a step after which ranks wait for the file "go"
    processes: int = 0  # of each rank's loader

    @one_thread()
    def __call__(self):
        ledger, quotas, ticks = {}, set(), 0.0
        balance = "even" if self.slow is None else "speed"
        training = ExactTraining(ledger, **SIZES, balance=balance, num_workers=self.processes)

        def tick():
            nonlocal ticks
            ticks += 3.0 if hvd.rank() == self.slow else 1.0
            return ticks

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, EPOCHS):
                for step in training.loader:
                    quotas.add(len(training.loader.block))
                    ledger.clear()
                    training.backward(step)
                    with (self.marks / f"ledger-{os.getpid()}").open("a") as file:
                        print(json.dumps([*ledger.items()]), file=file)
                    training.update()
                    while state.steps == self.hold and not (self.marks / "go").exists():
                        time.sleep(0.01)
                    state.commit()
                    time.sleep(self.seconds)

        with mock.patch.object(balancer, "clock", tick):
            train(training.state)
        return training.digest(), training.loader.why_not_exact, sorted(quotas)


@pytest.fixture(scope="module")
def alone():
    digest, ledger = train_alone(EPOCHS, **SIZES)
    for epoch in range(EPOCHS):
        rows = [row for place, each in ledger.items() if place[0] == epoch for row in each]
        assert sorted(rows) == list(range(ROWS))
    return digest, ledger


def check(results, work, alone):
    assert {result[:2] for result in results} == {(alone[0], "")}
    ledger = {}
    for path in work.marks.glob("ledger-*"):
        for line in path.read_text().splitlines():
            for place, rows in json.loads(line):
                assert ledger.setdefault(tuple(place), rows) == rows
    assert ledger == alone[1]


@pytest.mark.parametrize(("backend", "processes"), [("gloo", 0), ("shm", 2)])
def test_ranks_that_die_join_and_leave_change_no_bit(crew, tmp_path, alone, backend, processes):
    work = SameResult(tmp_path, seconds=0.03, processes=processes, hold=2)
    job = crew.fit(work, backend=backend, **PATIENT)
    until(lambda: job.status.state == "running" or job.done(), "it runs")
    plan = chaos.inject(
        job,
        chaos.kill(rank=2, step=4),
        chaos.partition(rank=0, step=9),
        chaos.fail(rank=1, step=14),
    )
    (tmp_path / "go").touch()  # the faults are known to all ranks before they happen
    check(job.results(120), work, alone)
    assert plan.wait(10)
    assert len(set(sizes(job))) > 1


def test_a_slow_rank_computes_less_and_changes_no_bit(crew, tmp_path, alone):
    work = SameResult(tmp_path, slow=1)
    job = crew.fit(work, np=4)
    check(job.results(), work, alone)
    assert [quotas for *_, quotas in job.results()] == [[2, 3], [1, 2], [2], [2]]
    (event,) = (event for event in job.history if event.kind == "straggler")
    assert event.rank == 1
    assert event.figures == {"times": 3.0, "micro_batches": 1.0, "before": 2.0, "of": 8.0}
    assert event.detail.startswith("takes 3.0 times as long")


def test_a_job_that_resumes_at_another_size_ends_with_the_same_bits(crew, tmp_path, alone):
    work = SameResult(tmp_path, seconds=0.05, hold=9)
    options = {"checkpoint": tmp_path / "checkpoints", "checkpoint_every": 3}
    first = crew.fit(work, np=4, block=False, **options)
    until(lambda: first.status.commits == 8 or first.done(), "commits")
    first.stop()
    until(lambda: "stop" in first.status.reason, "the order to stop")
    (tmp_path / "go").touch()
    first.wait(60)
    assert first.status.state == "stopped"
    second = crew.fit(work, np=3, resume=True, **options)
    check(second.results(), work, alone)
