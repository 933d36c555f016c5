"""The scheduler's copy of a machine: stepped, handed over, ended with its lease."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from nbelastic import messages as m
from nbelastic.cluster.scheduler.job import MOST_BEHIND, ScheduledJob
from nbelastic.membership import Machine, unpack_machine
from tests.support.records import a_record

SLOT = m.Slot("w0", "tcp://w0", "w0", "host")


def step(number: int, now: float, chance: float = 0.0, **fields: Any) -> m.JournalStep:
    return m.JournalStep("job", "topic", 1, number, now, chance, **fields)


class ControlledJob:
    """A job on a scheduler."""

    def __init__(self, lease: float = 3600.0) -> None:
        self.scheduler = Mock()
        self.effects: list[m.Effect] = []
        self.record = a_record(Machine(m.Limits()), self.scheduler, self.carry_out, lease=lease)

    def carry_out(self, job: ScheduledJob, effects: list[m.Effect]) -> None:
        self.effects += effects

    def number_of(self, kind: type[m.Effect]) -> int:
        return sum(isinstance(each, kind) for each in self.effects)

    def find(self) -> None:
        self.record.take_in(m.SlotsFound((SLOT,)))

    def kinds(self) -> list[str]:
        return [event.kind for event in self.record.log.contents().history]


async def test_an_event_happens_once_when_the_driver_says_so_and_a_missing_step_is_noticed():
    job = ControlledJob()
    job.find()
    job.scheduler.client_send.assert_called_once()
    assert not job.effects
    for _ in range(2):
        assert job.record.step(step(1, 2.0, seq=1))
        assert job.number_of(m.StartRank) == 1
    assert job.record.backlog == {}
    assert job.record.machine.roster.now == 2.0
    assert not job.record.step(step(3, 3.0, event=m.Tick()))


async def test_what_has_not_been_stepped_is_kept_for_who_takes_over():
    job = ControlledJob()
    job.find()
    job.find()
    assert job.record.step(step(1, 1.0, seq=1))
    packed = job.record.take_over("another", "its topic")
    assert packed.epoch == 2
    assert packed.seq == 1
    assert unpack_machine(packed.machine).roster.ranks.keys() == {0}
    assert list(job.record.backlog) == [2]
    assert job.record.step(step(1, 1.5, seq=2))
    assert job.kinds()[-1] == "attached"


async def test_a_driver_that_is_far_behind_is_spared_heartbeats_and_nothing_else():
    job = ControlledJob()
    for _ in range(3 * MOST_BEHIND):
        job.record.take_in(m.Beats(()))
    assert len(job.record.backlog) == MOST_BEHIND + 1
    job.find()
    assert len(job.record.backlog) == MOST_BEHIND + 2


@pytest.mark.parametrize("ranks", [0, 1])
async def test_a_job_that_nobody_takes_over_is_ended_and_over_with_its_lease(ranks):
    job = ControlledJob(lease=0.4)
    if ranks:
        job.find()
        job.record.step(step(1, 1.0, seq=1))
    job.record.abandon()
    before = job.record.machine.roster.now
    for _ in range(100):
        await asyncio.sleep(0.02)
        if ranks and job.number_of(m.EndRank):
            job.record.take_in(m.RankLeft(0))
        if job.record.over:
            break
    assert job.record.over
    assert job.record.machine.roster.now > before, "time goes on without a driver"
    assert job.kinds()[0] == "abandoned"
    assert "stopped" in job.kinds()
    job.record.stop()


# -- what was decided, and why ---------------------------------------------------------------------


def lose_a_rank(job: ControlledJob) -> None:
    job.find()
    job.record.step(step(1, 1.0, 0.25, seq=1))
    job.record.take_in(m.SlotSilent("w0", seconds=10.5))
    job.record.step(step(2, 12.0, 0.75, seq=2))


def test_each_decision_is_one_line_with_its_numbers_and_what_was_seen(caplog):
    async def scene() -> None:
        lose_a_rank(ControlledJob())

    with caplog.at_level("INFO", logger="nbelastic.cluster.scheduler"):
        asyncio.run(scene())
    lines = [record.getMessage() for record in caplog.records]
    lost = next(line for line in lines if "job 'job': lost" in line)
    assert "start 0 on tcp://w0" in lost
    assert "seconds 10.5" in lost
    assert "seen by the scheduler: slot silent, reason worker silent" in lost
    assert not any("\n" in line for line in lines)
