"""Retirement as cluster managers ask for it: by address, by name, or by batch job.

All workers by name: then the cluster is being closed, and no rank could stay.
"""

from __future__ import annotations

import asyncio

import pytest

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
