"""Workers forked from a process that has imported what they need.

Imported before clusters are made, this module has their workers forked from one that has Dask and
the agent. (A worker has no torch: the host's rank template has.) Kernels of notebooks import this,
and the nannies of several hosts: they start beside other tests. Clusters of examples and benchmarks
start as Dask does.
"""

import os

import dask
from distributed.utils import get_mp_context

dask.config.set(
    {
        "distributed.worker.multiprocessing-method": "forkserver",
        # What idle workers spend processor time on, of which tests keep many.
        "distributed.worker.profile.enabled": False,
        "distributed.worker.memory.monitor-interval": "5s",
        "distributed.admin.tick.interval": "500ms",
        "distributed.admin.system-monitor.interval": "5s",
        "distributed.admin.system-monitor.gil.enabled": False,
    }
)
get_mp_context().set_forkserver_preload(
    ["distributed", "nbelastic.cluster.worker.agent", "tests.support.forking"]
)
os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a worker that crashes says where
