"""Machines that say they will go: left at a commit, shown with the time that is left."""

from __future__ import annotations

import pytest

from nbelastic.cluster.worker.notice_watcher import POLL_INTERVAL, REQUEST_LIMIT_S
from nbelastic.membership import rules, view
from nbelastic.messages import (
    EndRank,
    GoneBeforeCommit,
    LossReason,
    NoneStays,
    Notice,
    Noticed,
    NoticeSource,
    ShareSet,
    SlotLeaving,
    SlotsFound,
    SlotStays,
    StartRank,
)
from tests.support.metadata import FakeMetadata, Machine, notice_of

from .invariants import contents
from .ranks import Script
from .stories import batches, job, trained
from .world import World

LONG = Script(batches=20_000)
NOON = 1700000000.0
FAULTS = [
    {},
    {"broken": 401},
    {"broken": 503},
    {"slow": REQUEST_LIMIT_S + 1},
    {"slow": REQUEST_LIMIT_S - 0.5},
    {"body": b"<html>log in</html>"},
    {"token": "second"},
]
OVER = {"broken": 0, "slow": 0.0, "body": None}


def noticed(world: World, name: str, seconds: float = 120.0) -> SlotLeaving:
    notice = Notice(NoticeSource.AWS, "terminate", seconds, name)
    return SlotLeaving(world.worker(name).slot.id, notice=notice)


def stays(world: World, name: str) -> SlotStays:
    return SlotStays(world.worker(name).slot.id)


def risk(world: World, name: str) -> SlotLeaving:
    notice = Notice(NoticeSource.AWS, "rebalance", name=name, soft=True)
    return SlotLeaving(world.worker(name).slot.id, notice=notice)


def names(world: World) -> list[str]:
    """Return the workers that have ranks."""
    return sorted(rank.slot.name for rank in world.machine.roster.ranks.values())


def ends(world: World) -> list[EndRank]:
    return [effect for effect in world.effects if isinstance(effect, EndRank)]


def played(number: int) -> Machine:
    """Return a machine of some cloud whose service gets into trouble, and gives notice in it.

    The notice of every third one is revoked once, and given again.
    """
    service = FakeMetadata(("aws", "google", "azure")[number % 3])

    def give(at: float) -> tuple[float, object]:
        return NOON + at, lambda s: s.__dict__.update(notice=notice_of(s.cloud, 120.0, NOON + at))

    fault = FAULTS[number % len(FAULTS)]
    script = [
        (NOON + 10, lambda s: s.__dict__.update(fault)),
        give(15),
        (NOON + 40, lambda s: s.__dict__.update(OVER)),
    ]
    if number % 3 == 0:
        script += [(NOON + 60, lambda s: s.__dict__.update(notice=None)), give(80)]
    return Machine(service, script, NOON).run(NOON + 100)  # type: ignore[arg-type]


def test_a_hundred_notices_of_watched_machines_cost_no_step() -> None:
    """The real watcher reads what scripted services answer; the machine acts on it."""
    world = trained(job("A0", "B0", "C0", np=3, min_np=1, script=LONG))
    workers, given = ["A0", "B0", "C0"], 0
    for number in range(100):
        world.add(f"N{number}")
        world.run_for(1.0)
        name = workers.pop(0)
        workers.append(f"N{number}")
        machine = played(number)
        seconds = machine.now - NOON
        polls = seconds / POLL_INTERVAL
        assert len(machine.requests) <= 2 * polls + 4, "AWS has two items; and 3 find a cloud"
        verdicts = [(at, notice) for at, notice, _ in machine.told]
        assert verdicts[-1][1] is not None
        for _, notice in verdicts[1:]:
            if notice is None:
                world.tell(stays(world, name))
                world.tell(SlotsFound((world.worker(name).slot,)))
            else:
                given += 1
                world.tell(noticed(world, name, notice.seconds))
            world.run_for(1.0)
        world.kill(name)
    assert given > 100
    assert batches(world) == sorted(set(batches(world))), "none was trained again"
    assert {record.reason.reason for record in world.records("left")} == {LossReason.LEFT}
    assert not world.records("lost")


def test_the_status_counts_down_until_the_worker_is_gone() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=LONG))
    world.tell(noticed(world, "B0"))
    world.run_for(20.0)
    (shown,) = view(world.machine.machine, world.now).reason.notices
    assert shown.name == "B0"
    assert 99.0 < shown.seconds <= 101.0
    world.kill("B0")
    world.run_for(1.0)
    assert not isinstance(view(world.machine.machine, world.now).reason, Noticed)


def test_a_notice_is_recorded_once() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=LONG))
    world.tell(noticed(world, "B0"))
    world.tell(noticed(world, "B0"))
    assert [record.name for record in world.records("notice")] == ["B0"]


def test_the_last_holder_stays_for_as_long_as_its_machine_does() -> None:
    world = trained(job("A0", np=1, min_np=1, script=LONG), 20)
    world.tell(noticed(world, "A0"))
    world.run_for(60.0)
    assert world.sizes() == [1]
    world.add("B0")
    world.run_for(5.0)
    assert [rank.slot.name for rank in world.machine.machine.roster.ranks.values()] == ["B0"]
    assert batches(world) == sorted(set(batches(world)))


def test_a_rank_that_was_not_sent_away_yet_stays_when_the_notice_is_revoked() -> None:
    world = trained(job("A0", np=1, min_np=1, script=LONG), 20)
    world.tell(noticed(world, "A0"))
    world.run_for(5.0)
    world.tell(stays(world, "A0"))
    world.run_for(200.0)
    assert world.sizes() == [1]
    assert [record.reason.revoked for record in world.records("notice")] == [False, True]


def test_a_slot_can_be_used_again_when_the_notice_is_revoked() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=LONG))
    world.tell(noticed(world, "B0"))
    world.run_for(5.0)
    slot = world.worker("B0").slot
    world.tell(SlotsFound((slot,)))
    world.run_for(5.0)
    assert world.sizes()[-1] == 1
    world.tell(stays(world, "B0"))
    world.tell(SlotsFound((slot,)))
    world.run_for(5.0)
    assert world.sizes()[-1] == 2


def test_a_revocation_of_nothing_changes_nothing() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, script=LONG))
    before = contents(world.machine.machine)
    assert world.machine.machine.handle(stays(world, "B0"), world.machine.machine.roster.now) == []
    assert contents(world.machine.machine) == before


# -- a deadline that comes nearer, or is there -----------------------------------------------------


@pytest.mark.parametrize("seconds", [30.0, 5.0, 0.0, -100.0])
def test_the_last_holder_never_stays_longer_than_its_machine(seconds: float) -> None:
    world = trained(job("A0", np=1, min_np=1, script=LONG), 20)
    world.tell(noticed(world, "A0", seconds))
    (rank,) = world.machine.roster.ranks.values()
    assert rank.leave_deadline <= world.now + max(seconds, 0.0)


def test_the_last_holder_has_less_time_when_its_machine_has() -> None:
    world = trained(job("A0", np=1, min_np=1, script=LONG), 20)
    world.tell(noticed(world, "A0", 900.0))
    world.run_for(1.0)
    world.tell(noticed(world, "A0", 60.0))
    world.run_for(50.0)
    assert names(world) == []
    assert len(world.records("notice")) == 1


def test_a_newcomer_whose_machine_goes_never_joins() -> None:
    world = trained(job("A0", np=1, min_np=1, max_np=3, script=Script(batches=20_000, setup=3.0)))
    world.add("B0")
    world.run_for(1.0)
    world.tell(noticed(world, "B0"))
    world.run_for(10.0)
    assert world.sizes() == [1]
    assert [effect.start for effect in ends(world)] == [1]


# -- where all leave -------------------------------------------------------------------------------


def test_the_state_is_saved_by_one_rank_where_all_leave() -> None:
    """With half of the time left, so that the file is there before the machine is gone."""
    world = trained(job("A0", "B0", np=2, min_np=1, checkpoint=True, script=LONG), 20)
    world.tell(noticed(world, "A0"))
    world.tell(noticed(world, "B0"))
    world.run_for(50.0)
    assert world.sizes() == [2, 1], "the last one trains on while there is time"
    world.run_for(10.0)
    assert names(world) == []
    assert [effect.save > 20 for effect in ends(world)] == [False, True]
    assert batches(world) == sorted(set(batches(world)))
    assert not world.records("warning")


def test_of_ranks_that_leave_together_one_saves() -> None:
    """Their time is over at the same moment."""
    world = trained(job("A0", "B0", np=2, min_np=1, checkpoint=True, script=LONG), 20)
    for name in ("A0", "B0"):
        slot = world.worker(name).slot.id
        for rank in world.machine.roster.on_slot(slot):
            rank.leaving, rank.gone_at = True, world.now + 50.0
    world.run_for(5.0)
    assert sorted(effect.save for effect in ends(world)) == [0.0, pytest.approx(25.0, abs=3.0)]


def test_a_rank_that_waits_with_the_state_saves_it() -> None:
    """Too few ranks are left to train; then the machine of the one with the state goes, too."""
    world = trained(job("A0", "B0", np=2, min_np=2, checkpoint=True, script=LONG), 20)
    world.kill("A0")
    world.run_for(5.0)
    world.tell(noticed(world, "B0"))
    world.run_for(100.0)
    assert [0 < effect.save <= 10 for effect in ends(world)] == [True]


def test_that_nothing_keeps_the_state_is_said_in_time_and_once() -> None:
    world = trained(job("A0", "B0", np=2, min_np=2, script=LONG), 20)
    world.tell(noticed(world, "A0"))
    assert not world.records("warning")
    world.tell(noticed(world, "B0"))
    world.tell(noticed(world, "B0", 60.0))
    assert [record.reason for record in world.records("warning")] == [NoneStays()]


def test_a_rank_that_comes_to_no_commit_in_time_is_a_warning() -> None:
    script = Script(batches=20_000, step=60.0)
    world = trained(job("A0", "B0", np=2, min_np=1, stall_timeout=600.0, script=script), 2)
    world.tell(noticed(world, "B0", 30.0))
    world.run_for(20.0)
    world.kill("B0")
    world.run_for(1.0)
    (record,) = world.records("warning")
    assert record.reason.name == "B0"
    assert isinstance(record.reason, GoneBeforeCommit)


def test_a_process_that_dies_as_it_is_asked_is_no_such_warning() -> None:
    script = Script(batches=20_000, step=60.0)
    world = trained(job("A0", "B0", np=2, min_np=1, stall_timeout=600.0, script=script), 2)
    world.tell(noticed(world, "B0", 30.0))
    world.kill("B0")
    world.run_for(1.0)
    assert not world.records("warning")


# -- machines at risk ------------------------------------------------------------------------------


def test_a_rank_at_risk_is_replaced_in_one_reset_and_nothing_is_redone() -> None:
    world = trained(job("A0", "B0", np=2, min_np=2, max_np=2, script=LONG), 20)
    world.tell(risk(world, "A0"))
    world.run_for(300.0)
    assert world.sizes() == [2], "nothing happens while none joins"
    world.add("C0")
    world.run_for(10.0)
    assert names(world) == ["B0", "C0"]
    assert world.sizes() == [2, 2]
    assert batches(world) == sorted(set(batches(world)))
    assert not world.records("lost")


def test_a_worker_that_idles_takes_the_place_at_once() -> None:
    world = trained(job("A0", "B0", "C0", np=2, min_np=2, max_np=2, script=LONG), 20)
    assert names(world) == ["A0", "B0"]
    world.tell(risk(world, "B0"))
    world.run_for(10.0)
    assert names(world) == ["A0", "C0"]


def test_a_place_at_risk_is_taken_only_where_the_job_lacks_ranks() -> None:
    world = trained(job("A0", "B0", "C0", np=2, min_np=2, max_np=2, script=LONG), 20)
    world.tell(risk(world, "C0"))
    world.tell(risk(world, "B0"))
    world.run_for(10.0)
    assert names(world) == ["A0", "B0"]
    world.kill("A0")
    world.run_for(10.0)
    assert names(world) == ["B0", "C0"], "better than none"


def test_the_only_rank_hands_its_state_over() -> None:
    world = trained(job("A0", np=1, min_np=1, max_np=1, script=LONG), 20)
    world.tell(risk(world, "A0"))
    world.add("B0")
    world.run_for(10.0)
    assert names(world) == ["B0"]
    assert batches(world) == sorted(set(batches(world)))
    assert not world.records("restarted")


def test_what_is_at_risk_no_more_stays() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, max_np=2, script=LONG), 20)
    world.tell(risk(world, "A0"))
    shown = view(world.machine.machine, world.now).reason
    assert isinstance(shown, Noticed) and shown.notices[0].soft
    world.tell(stays(world, "A0"))
    world.add("C0")
    world.run_for(10.0)
    assert names(world) == ["A0", "B0"]
    assert not isinstance(view(world.machine.machine, world.now).reason, Noticed)
    assert world.records("notice")[-1].reason.revoked


def test_a_newcomer_is_not_kept_when_the_risk_is_over_before_it_is_ready() -> None:
    script = Script(batches=20_000, setup=5.0)
    world = trained(job("A0", np=1, min_np=1, max_np=1, script=script), 20)
    world.tell(risk(world, "A0"))
    world.add("B0")
    world.run_for(1.0)
    assert names(world) == ["A0", "B0"]
    world.tell(stays(world, "A0"))
    world.run_for(10.0)
    assert names(world) == ["A0"]
    assert world.sizes() == [1]


def test_a_job_that_shares_its_cluster_starts_none_above_its_share() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, max_np=4, script=LONG), 20)
    world.tell(ShareSet(2, 3, ("other",), 1))
    world.tell(risk(world, "A0"))
    world.add("C0")
    world.run_for(10.0)
    assert names(world) == ["A0", "B0"]
    assert len([e for e in world.effects if isinstance(e, StartRank)]) == 2


def test_a_notice_of_a_machine_at_risk_counts_as_any() -> None:
    world = trained(job("A0", "B0", np=2, min_np=1, max_np=2, script=LONG), 20)
    world.tell(risk(world, "A0"))
    world.tell(noticed(world, "A0"))
    world.run_for(5.0)
    assert names(world) == ["B0"]


def test_the_time_to_stay_leaves_time_to_write() -> None:
    world = job("A0", checkpoint=True)
    assert rules.time_to_stay(world.machine.roster, 120.0) == 55.0
    assert rules.time_to_stay(job("A0").machine.roster, 120.0) == 100.0
