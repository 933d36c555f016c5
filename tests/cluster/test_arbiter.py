"""The arbiter: whatever the order of events, jobs share the slots, and none is stuck."""

import asyncio
import contextlib
from collections import Counter

import dask
import pytest
from distributed.core import Status
from msgspec.structs import replace

from nbelastic import messages as m
from nbelastic.cluster.scheduler.arbiter import read_rules
from nbelastic.errors import OptionError
from nbelastic.sharing import SharingRules

from .shared_cluster import SharedCluster

AT_ONCE = {"nbelastic.sharing": {"settle": 0, "protect": 0, "patience": "1 hour"}}


async def settle(cluster, most=5000):
    """Let everything happen, in a random order, until nothing is left to happen."""
    quiet = 0
    for _ in range(most):
        await asyncio.sleep(0)
        actions = cluster.actions()
        if actions:
            cluster.random.choice(actions)()
            quiet = 0
            continue
        if quiet > 4:
            return
        cluster.beat()
        cluster.plugin._review_all()
        quiet += 1
        await asyncio.sleep(0)
        cluster.step_all()
    raise AssertionError(f"restless: {cluster.held()}")


async def begin(cluster, name, **options):
    """Open a job, and let all come of it."""
    await cluster.open(name, **options)
    await settle(cluster)


@contextlib.asynccontextmanager
async def a_cluster(workers, seed=0, config=AT_ONCE):
    with dask.config.set(config):
        cluster = await SharedCluster(seed).start()
        for number in range(workers):
            cluster.hire(f"w{number}")
        try:
            yield cluster
        finally:
            await cluster.plugin.before_close()


async def test_a_claim_by_a_former_share_is_refused_and_the_slot_offered_again():
    async with a_cluster(3) as cluster:
        await cluster.open("one")
        # Its driver knows of three slots, and has not heard of its share when it starts ranks.
        await cluster.open("two", min_np=2)
        cluster._step(cluster.jobs["one"])
        assert cluster.held() == {"one": 1, "two": 0}
        await settle(cluster)
        assert cluster.sizes() == {"one": 1, "two": 2}


async def test_with_a_new_share_all_slots_of_it_are_offered_again():
    """The machine forgets its vacant slots then."""
    async with a_cluster(2) as cluster:
        await cluster.open("one", min_np=2)
        await cluster.open("two")
        for number in range(4):
            cluster.hire(f"new{number}")
        cluster.plugin.arbiter.decide()
        events = [each.event for each in cluster.plugin.jobs["one"].backlog.values()]
        first = [isinstance(each, m.ShareSet) for each in events[::-1]].index(True)
        found = [each for each in events[-first:] if isinstance(each, m.SlotsFound)]
        offered = {slot.id for each in found for slot in each.slots}
        owners = cluster.plugin.arbiter.reserved
        assert len(offered) == 3
        assert offered == {slot for slot, owner in owners.items() if owner == "one"}


async def test_a_worker_that_was_paused_is_used_once_dask_lets_it_go_on():
    async with a_cluster(2) as cluster:
        paused = list(cluster.workers.values())[1]
        paused.status = Status.paused
        await begin(cluster, "one")
        assert cluster.sizes() == {"one": 1}
        (unused,) = cluster.roster("one").unused
        assert unused.reason is m.UnusedReason.PAUSED
        paused.status = Status.running  # which Dask announces to nobody
        await settle(cluster)
        assert cluster.sizes() == {"one": 2}


async def test_a_slot_that_only_one_job_can_use_is_left_for_it():
    async with a_cluster(0) as cluster:
        gpu = cluster.hire("gpu", GPU=1)
        await begin(cluster, "any", min_np=1, max_np=1)
        cluster.hire("cpu")
        await begin(cluster, "needs gpu", resources={"GPU": 1}, max_np=1)
        assert cluster.sizes() == {"any": 1, "needs gpu": 1}
        (host,) = cluster.plugin.jobs["needs gpu"].ranks.values()
        assert host.address == gpu
        assert not cluster.roster("any").policy.setbacks


@pytest.mark.parametrize("lost", ["worker", "unreadable message"])
async def test_a_lost_rank_had_come_as_far_as_its_last_heartbeat_says(lost):
    """Also if that was not passed on yet: else deaths at one commit look like progress."""
    async with a_cluster(1) as cluster:
        await begin(cluster, "one")
        ((start, host),) = cluster.plugin.jobs["one"].ranks.items()
        beat = m.Beat(start, 1, 0, waiting=False, version=7)
        cluster.plugin._take_beats(host.address, m.Heartbeats((("one", beat),)))
        if lost == "worker":
            cluster.kill_worker(host.address)
        else:
            cluster.plugin._take(host.address, None)
        cluster.step_all()
        assert cluster.roster("one").newest == 7
        assert start not in cluster.roster("one").ranks


async def test_a_driver_that_stands_still_gets_no_more_slots():
    async with a_cluster(2) as cluster:
        await cluster.open("still", min_np=2)
        await cluster.open("late", min_np=2)
        job = cluster.jobs.pop("still")  # nothing is stepped any more
        cluster.plugin.arbiter._entries["still"].stepped_at -= 60.0
        await settle(cluster)
        assert cluster.sizes()["late"] == 2
        cluster.jobs["still"] = job
        await settle(cluster)
        assert cluster.held() == {"still": 0, "late": 2}
        cluster.stop("late")
        await settle(cluster)
        assert cluster.sizes()["still"] == 2


async def test_a_slot_whose_worker_is_frozen_is_promised_to_nobody():
    """Else a job would wait for it, while another one keeps a slot that it could have."""
    async with a_cluster(4) as cluster:
        await begin(cluster, "wide")
        record = cluster.plugin.jobs["wide"]
        start, host = next(iter(record.ranks.items()))
        del cluster.ranks["wide", start]  # it does and says nothing any more
        cluster.plugin._heartbeats._report_silent(host, m.LossReason.WORKER_SILENT)
        await settle(cluster)
        await begin(cluster, "late", min_np=2)
        assert cluster.sizes() == {"wide": 1, "late": 2}
        # It goes on, and sees that it was to end. Then it can fall silent once more.
        cluster.plugin._ended(host.address, m.RankEnded("wide", start))
        await settle(cluster)
        assert cluster.sizes() == {"wide": 2, "late": 2}
        assert not host.frozen


async def test_a_rank_that_outlives_its_job_keeps_its_slot_from_nobodys_floor():
    async with a_cluster(4) as cluster:
        await begin(cluster, "gone", max_np=1)
        cluster.ranks.clear()  # it never ends
        cluster.jobs.pop("gone")
        cluster.plugin.service.drop("gone")
        await begin(cluster, "wide")
        await begin(cluster, "late", min_np=2)
        assert cluster.sizes() == {"wide": 1, "late": 2}


async def test_a_job_that_is_without_its_kernel_shrinks_and_does_not_grow():
    async with a_cluster(4) as cluster:
        await begin(cluster, "orphan")
        cluster.kill_kernel("orphan")
        await begin(cluster, "late", min_np=2, max_np=2)
        assert cluster.sizes() == {"orphan": 2, "late": 2}
        cluster.stop("late")
        await settle(cluster)
        assert cluster.held() == {"orphan": 2, "late": 0}
        await cluster.attach("orphan")
        await settle(cluster)
        assert cluster.sizes()["orphan"] == 4


async def test_a_job_is_dropped_when_its_lease_is_over():
    async with a_cluster(2) as cluster:
        await begin(cluster, "orphan")
        cluster.kill_kernel("orphan")
        record = cluster.plugin.jobs["orphan"]
        record.terms = replace(record.terms, lease=0.0)
        await asyncio.sleep(0.3)  # its caretaker looks after it
        await settle(cluster)
        assert "orphan" not in cluster.plugin.jobs


async def test_of_suspended_jobs_that_keep_each_other_from_their_floors_the_younger_fails_in_time():
    async with a_cluster(4) as cluster:
        options = {"min_np": 2, "max_np": 2, "preemptible": True}
        await cluster.open("old", **options)
        await begin(cluster, "young", **options)
        assert cluster.sizes() == {"old": 2, "young": 2}
        for name in ("old", "young"):
            host = next(iter(cluster.plugin.jobs[name].ranks.values()))
            cluster.kill_worker(host.address)
        await settle(cluster)
        assert cluster.held() == {"old": 1, "young": 1}
        assert cluster.roster("old").short_since is None
        assert cluster.roster("young").short_since is not None
        cluster.stop("young")
        await settle(cluster)
        assert cluster.sizes()["old"] == 2


async def test_all_jobs_together_are_asked_for_of_an_adaptive_cluster():
    async with a_cluster(3) as cluster:
        await cluster.open("one", min_np=1, max_np=2)
        await cluster.open("two", min_np=2, np=2, max_np=4)
        await begin(cluster, "open end", min_np=1)
        assert cluster.plugin.departures.demand() == 2 + 4 + 1
        cluster.kill_kernel("two")
        assert cluster.plugin.departures.demand() == 2 + cluster.held()["two"] + 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"policy": "best"}, r"nbelastic\.sharing\.policy='best'"),
        ({"settle": "soon"}, r"nbelastic\.sharing\.settle='soon': must be a duration"),
        ({"protect": -1}, r"nbelastic\.sharing\.protect=-1"),
        ({"protect": ""}, r"nbelastic\.sharing\.protect=''"),
        ({"patience": "1e400 s"}, r"nbelastic\.sharing\.patience='1e400 s'"),
    ],
)
def test_rules_have_defaults_and_those_that_are_not_possible_are_named(setting, message):
    refused = pytest.raises(OptionError, match=message)
    assert read_rules() == SharingRules()
    with dask.config.set({"nbelastic.sharing": setting}), refused:
        read_rules()
    with dask.config.set({"nbelastic.sharing": {"settle": "1 minute"}}):
        assert read_rules() == SharingRules(settle=60.0)


async def something_happens(cluster, number):
    chance = cluster.random
    kind = chance.choice(("open", "open", "stop", "kernel", "worker", "hire", "scale", "retire"))
    live = [name for name in cluster.jobs if not cluster.roster(name).ended]
    if kind == "open" and len(live) < 4:
        least = chance.randint(1, 3)
        await cluster.open(
            f"job{number}",
            np=least,
            min_np=least,
            max_np=chance.choice((None, least, least + 1)),
            priority=chance.choice((0, 0, 1)),
            preemptible=chance.random() < 0.3,
            slots_per_host=chance.choice((None, None, None, 2)),
        )
    elif kind == "stop" and live:
        cluster.stop(chance.choice(live))
    elif kind == "kernel" and live:
        name = chance.choice(live)
        if cluster.plugin.jobs[name].client is None:
            await cluster.attach(name)
        elif cluster.plugin.jobs[name].steps:
            cluster.kill_kernel(name)
    elif kind == "worker" and len(cluster.workers) > 3:
        cluster.kill_worker(chance.choice(sorted(cluster.workers)))
    elif kind == "hire" and len(cluster.workers) < 7:
        cluster.hire(f"new{number}", chance.choice("gh"))
    elif kind == "scale" and live:
        change = chance.choice(({"priority": 2}, {"priority": 0}, {"max_np": 2, "min_np": 1}))
        cluster.tell(chance.choice(live), m.LimitsChanged(**change))
    elif kind == "retire" and len(cluster.workers) > 3:
        cluster.plugin.departures.mark_leaving(chance.choice(sorted(cluster.workers)))


def check_slots(cluster):
    """A slot is one job's, and its holder knows."""
    for worker in cluster.plugin.workers.values():
        holders = [
            (name, start)
            for name, record in cluster.plugin.jobs.items()
            for start, at in record.ranks.items()
            if at is worker
        ]
        assert holders == ([worker.holder] if worker.holder else [])


def check_end(cluster):
    """All who can train do so with their share, and nobody else holds anything."""
    live = {n: r for n, r in cluster.plugin.jobs.items() if not r.machine.roster.ended}
    usable = [w for w in cluster.plugin.workers.values() if not w.leaving]
    free = [w for w in usable if w.holder is None]
    sizes = cluster.sizes()
    for name, record in live.items():
        roster = record.machine.roster
        limits, held = roster.limits, len(roster.staying())
        short = held < limits.min_np
        assert short or sizes[name] >= held, f"{name}: {sizes[name]} of {held}"
        admitted = cluster.plugin.arbiter._entries[name].admitted
        assert held == 0 or not short or admitted, f"{name} holds part of its floor"
        if record.client is not None and not short and roster.share is not None:
            assert held <= roster.share
        wants_more = limits.max_np is None or held < limits.max_np
        most = limits.slots_per_host or 99
        on_host = Counter(at.slot.host for at in record.ranks.values())
        room = [worker for worker in free if on_host[worker.slot.host] < most]
        could = record.client is not None and wants_more and room
        assert not (could and not short), f"{name} has {held}, {len(free)} slots are free"
        assert not (could and len(room) + held >= limits.min_np and not limits.slots_per_host), (
            f"{name} waits with {held}, {len(free)} slots are free"
        )


@pytest.mark.parametrize("block", range(4))
def test_whatever_happens_in_whatever_order_the_slots_are_shared(block):
    async def play(seed):
        async with a_cluster(4, seed) as cluster:
            for number in range(12):
                await something_happens(cluster, number)
                for _ in range(cluster.random.randint(0, 30)):
                    await asyncio.sleep(0)
                    actions = cluster.actions()
                    if actions:
                        cluster.random.choice(actions)()
                    check_slots(cluster)
            await settle(cluster)
            check_slots(cluster)
            check_end(cluster)

    for seed in range(block * 25, block * 25 + 25):
        try:
            asyncio.run(play(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
