"""The names of all messages, and which way they go.

All of them use connections that Dask has anyway: the kernel's client to the scheduler, and the
scheduler to its workers. Nothing ever connects to the kernel.

========================  =======================  ===============================================
message                   way                      says
========================  =======================  ===============================================
``nbelastic_open``        kernel → scheduler, rpc  publish a job: its function, and which workers
``nbelastic_attach``      kernel → scheduler, rpc  take a job over
``nbelastic_close``       kernel → scheduler, rpc  the job is over
``nbelastic_jobs``        kernel → scheduler, rpc  which jobs are there
``nbelastic_payload``     agent → scheduler, rpc   the function, please
``nbelastic-step``        kernel → scheduler       what the driver has decided: which event, when
``nbelastic-order``       kernel → scheduler       something for ranks besides membership
``nbelastic-give-up``     kernel → scheduler       do not open, or hand over, what was asked for
``nbelastic-hello``       agent → scheduler        a worker is ready to host a rank
``nbelastic-report``      agent → scheduler        an event of a rank, for its driver
``nbelastic-beats``       agent → scheduler        heartbeats of all ranks of a worker
``nbelastic-output``      agent → scheduler        what a rank printed
``nbelastic-harm``        agent → scheduler        what was done to a rank on order
``nbelastic-ended``       agent → scheduler        a rank's task is over, its slot is free
``nbelastic``             scheduler → agent        plan, abort, notice, release, end, forget
topic ``nbelastic-…``     scheduler → kernel       events, grants, output, "stale"
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
