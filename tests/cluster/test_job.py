"""The scheduler's copy of a machine: stepped, handed over, ended with its lease; its journal."""

from __future__ import annotations

import asyncio
import getpass
import os
import stat
from typing import Any
from unittest.mock import Mock

import dask
import pytest

from nbelastic import messages as m
from nbelastic.cluster import journal as journals
from nbelastic.cluster import replay
from nbelastic.cluster.scheduler.job import MOST_BEHIND, ScheduledJob
from nbelastic.errors import OptionError
from nbelastic.membership import Machine, unpack_machine
from tests.membership.invariants import contents
from tests.support.records import a_record

SLOT = m.Slot("w0", "tcp://w0", "w0", "host")


def step(number: int, now: float, chance: float = 0.0, **fields: Any) -> m.JournalStep:
    return m.JournalStep("job", "topic", 1, number, now, chance, **fields)


def claim(job: ScheduledJob, effect: Any) -> None:
    """Give a slot to a rank, as the plugin does while there is a kernel."""
    job.ranks[effect.start] = effect.slot


class ControlledJob:
    """A job on a scheduler."""

    def __init__(self, journal: Any = None, lease: float = 3600.0) -> None:
        self.ops = Mock()
        self.ops.chance.return_value = 0.5
        self.ops.claim.side_effect = claim
        self.record = a_record(Machine(m.Limits()), self.ops, journal, lease=lease)

    def find(self) -> None:
        self.record.take_in(m.SlotsFound((SLOT,)))

    def kinds(self) -> list[str]:
        return [event.kind for event in self.record.log.contents().history]


async def test_an_event_happens_once_when_the_driver_says_so_and_a_missing_step_is_noticed():
    job = ControlledJob()
    job.find()
    job.ops.say.assert_called_once()
    job.ops.claim.assert_not_called()
    for _ in range(2):
        assert job.record.step(step(1, 2.0, seq=1))
        job.ops.claim.assert_called_once()
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
async def test_a_job_that_nobody_takes_over_is_ended_and_dropped_with_its_lease(ranks):
    job = ControlledJob(lease=0.4)
    if ranks:
        job.find()
        job.record.step(step(1, 1.0, seq=1))
    job.record.abandon()
    before = job.record.machine.roster.now
    for _ in range(100):
        await asyncio.sleep(0.02)
        ended = [call.args[1] for call in job.ops.order.call_args_list]
        if ranks and any(isinstance(each, m.EndRank) for each in ended):
            job.record.take_in(m.RankLeft(0))
        if job.ops.drop.called:
            break
    job.ops.drop.assert_called_with("job")
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


def test_a_saved_journal_comes_to_the_same_decisions_and_is_for_its_own_user(tmp_path):
    async def scene() -> ControlledJob:
        machine = Machine(m.Limits())
        with dask.config.set({"nbelastic.debug.journal": str(tmp_path)}):
            job = ControlledJob(journals.open_journal("job", "../uid", machine))
        lose_a_rank(job)
        job.record.stop()
        return job

    job = asyncio.run(scene())
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o077 == 0
    name, steps = replay(path)
    found = list(steps)
    assert name == "job"
    assert [type(each.event) for each in found] == [m.SlotsFound, m.SlotSilent]
    assert contents(found[-1].machine) == contents(job.record.machine)
    (lost,) = [e for e in found[-1].effects if isinstance(e, m.Record) and e.kind == "lost"]
    assert lost.start == 0

    path.write_text(path.read_text().replace("RestartWorker", "Release") + "half a li")
    with pytest.raises(OptionError, match="line 3: another version"):
        list(replay(path)[1])
    path.write_text("{}\n")
    with pytest.raises(OptionError, match="no journal"):
        replay(path)


def test_a_journal_is_bounded_and_its_newest_part_can_be_replayed(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "MOST_BYTES", 10_000)
    machine = Machine(m.Limits())
    journal = journals.JournalFile(tmp_path / "job.jsonl", "job", machine)
    for number in range(300):
        effects = machine.handle(m.Tick(), 0.1 * number, 0.0)
        journal.write(m.Tick(), 0.1 * number, 0.0, effects, machine)
    journal.close()
    assert {path.name for path in tmp_path.iterdir()} == {"job.jsonl", "job.old.jsonl"}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 25_000
    steps = list(replay(tmp_path / "job.jsonl")[1])
    assert contents(steps[-1].machine) == contents(machine)


def test_journals_are_in_a_directory_of_their_users_own_and_follow_no_link(tmp_path, caplog):
    place, victim = tmp_path / f"nbelastic-journals-{getpass.getuser()}", tmp_path / "victim"
    victim.mkdir()
    place.mkdir(mode=0o777)
    with dask.config.set({"nbelastic.debug.journal": True, "temporary-directory": str(tmp_path)}):
        journals.open_journal("job", "uid", Machine(m.Limits())).close()
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        (place / "link-uid.jsonl").symlink_to(victim / "file")
        assert journals.open_journal("link", "uid", Machine(m.Limits())) is None
        if not os.geteuid():  # only root can give a directory away
            os.chown(place, 65534, 65534)
            assert journals.open_journal("another", "uid", Machine(m.Limits())) is None
        place.rename(tmp_path / "away")
        place.symlink_to(victim)
        assert journals.open_journal("job", "uid", Machine(m.Limits())) is None
    assert caplog.text.count("has no journal") == 3 - bool(os.geteuid())
    assert not list(victim.iterdir())


def test_a_job_goes_on_when_its_journal_cannot_be_written(tmp_path, caplog):
    class FullDisk(journals.JournalFile):
        def write(self, *_: Any) -> None:
            raise OSError("no space left")

    async def scene() -> None:
        job = ControlledJob(FullDisk(tmp_path / "job.jsonl", "job", Machine(m.Limits())))
        lose_a_rank(job)
        assert "lost" in job.kinds()

    asyncio.run(scene())
    assert "the journal of job 'job' ends here: no space left" in caplog.text
    (tmp_path / "file").touch()
    with dask.config.set({"nbelastic.debug.journal": str(tmp_path / "file")}):
        assert journals.open_journal("job", "uid", Machine(m.Limits())) is None
