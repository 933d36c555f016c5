"""The names of all messages, and which way they go.

All of them use connections that Dask has anyway: the kernel's client to the scheduler, and the
scheduler to its workers. Nothing ever connects to the kernel.

========================  =======================  ===============================================
message                   way                      says
========================  =======================  ===============================================
``nbelastic_open``        kernel → scheduler, rpc  publish a job: its function, and which workers
``nbelastic_close``       kernel → scheduler, rpc  the job is over
``nbelastic_payload``     agent → scheduler, rpc   the function, please
``nbelastic-order``       kernel → scheduler       claim a slot, or pass something on to ranks
``nbelastic-hello``       agent → scheduler        a worker is ready to host a rank
``nbelastic-report``      agent → scheduler        an event of a rank, for its driver
``nbelastic-beats``       agent → scheduler        heartbeats of all ranks of a worker
``nbelastic-output``      agent → scheduler        what a rank printed
``nbelastic-ended``       agent → scheduler        a rank's task is over, its slot is free
``nbelastic``             scheduler → agent        plan, abort, notice, release, end, forget
topic ``nbelastic-…``     scheduler → kernel       events, grants, output
========================  =======================  ===============================================
"""

from __future__ import annotations

from typing import Any

__all__ = ["BEAT_INTERVAL", "PLUGIN", "Message"]

Message = dict[str, Any]

PLUGIN = "nbelastic"
"""Name of the scheduler plugin and of the worker plugins."""

BEAT_INTERVAL = 0.5
"""Seconds between heartbeats."""
