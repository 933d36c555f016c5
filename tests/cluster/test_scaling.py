"""Retirement as cluster managers ask for it: by address, by name, or by batch job.

All workers by name: then the cluster is being closed, and no rank could stay.
"""

from __future__ import annotations

import asyncio
from math import inf
from types import SimpleNamespace

import pytest

from nbelastic.cluster.scheduler import scaling

from .shared_cluster import SharedCluster


@pytest.mark.parametrize(
    ("asked", "leaving"),
    [
        ({"workers": ["tcp://0:1"]}, {"0"}),
        ({"names": [1]}, {"1"}),
        ({"workers": [1]}, {"1"}),
        ({"workers": ["slurm-1"]}, {"slurm-1-0", "slurm-1-1"}),
        ({"workers": ["slurm-1-1"]}, {"slurm-1-1"}),
        ({"workers": ["slurm", "slurm-"]}, set()),
        ({"workers": ["tcp://gone:1"]}, set()),
        ({"workers": [0, 1, "slurm-1", "slurm-10"]}, set()),
    ],
)
def test_workers_are_asked_to_leave_however_they_are_given(asked, leaving):
    called = []

    async def retire(**options):
        called.append(options)

    async def scene():
        cluster = SharedCluster()
        cluster.handlers["retire_workers"] = retire
        await cluster.start()
        for name in ("0", "1", "slurm-1-0", "slurm-1-1", "slurm-10-0"):
            cluster.hire(name)
        await cluster.handlers["retire_workers"](**asked)
        found = {w.slot.name for w in cluster.plugin._workers.values() if w.leaving}
        await cluster.plugin.before_close()
        return found

    assert asyncio.run(scene()) == leaving
    assert called == [asked], "Dask gets what was asked for"


@pytest.mark.parametrize(
    ("told", "left", "waited"),
    [(0.0, 5.0, 5.0), (0.0, inf, 30.0), (50.0, 70.0, 70.0), (50.0, inf, 80.0), (inf, inf, 120.0)],
)
def test_a_retired_worker_waits_for_the_last_holder_of_the_state(monkeypatch, told, left, waited):
    """It is told to leave only when another rank has the state."""
    now = 0.0

    async def sleep(seconds):
        nonlocal now
        now += seconds

    async def retire(**options):
        return now

    async def scene():
        cluster = SharedCluster()
        cluster.handlers["retire_workers"] = retire
        await cluster.start()
        address = cluster.hire("0")
        plugin = cluster.plugin
        monkeypatch.setattr(plugin, "mark_leaving", lambda address: [("job", 0)])
        monkeypatch.setattr(plugin, "holds", lambda rank: now < left)
        monkeypatch.setattr(plugin, "was_told", lambda rank: now >= told)
        monkeypatch.setattr(scaling, "asyncio", SimpleNamespace(sleep=sleep))
        found = await cluster.handlers["retire_workers"](workers=[address])
        await plugin.before_close()
        return found

    assert asyncio.run(scene()) == pytest.approx(waited, abs=0.1)
