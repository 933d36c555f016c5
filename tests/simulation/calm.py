"""When all was well: then a job has to finish."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.core import Status

from nbelastic.errors import ClusterLost, NoProgress, NotEnoughWorkers, RankFailed
from nbelastic.membership import rules

if TYPE_CHECKING:
    from .world import World

INTERVAL = 0.25
"""Seconds between two looks."""

RECOVERY = 2.0
"""Seconds, beyond its timeouts, that a job needs to come back from what has happened to it."""


class Calm:
    """Watches since when nothing has been in a job's way.

    Attributes
    ----------
    since : float
        When something was last in its way.
    lasted : float
        For how long nothing was, until the driver knew the job's end: to close a job takes time.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.since = self.lasted = 0.0
        self.over = False

    def look(self) -> None:
        world = self._world
        if self._trouble():
            self.since = world.hub.now
        if world.driver._outcome is None:
            self.lasted = world.hub.now - self.since
        if not self.over:
            world.later(INTERVAL, self.look)

    def _trouble(self) -> bool:
        """Return whether anything is in the job's way now."""
        world = self._world
        client, scheduler = world.kernels.client, world.scheduler.process
        down = not world.kernels.driving or client.status != "running" or client.process.frozen
        if down or not scheduler.alive or scheduler.frozen or world.network.cuts or world.slow:
            return True
        return any(w.process.frozen for w in world.living()) or not self._enough()

    def _enough(self) -> bool:
        """Return whether there are as many healthy workers as the job needs."""
        world = self._world
        if world.machine is None:
            return False
        roster = world.machine.roster
        hosts = world.scheduler.plugins["nbelastic"].workers
        crews: dict[str, int] = {}
        for worker in world.living():
            state = world.scheduler.workers.get(worker.address)
            host = hosts.get(worker.address)
            if state is None or state.worker is not worker or state.status != Status.running:
                continue
            if host is None or host.leaving or worker.id in roster.departing:
                continue
            slot = roster.slots.get(worker.id)
            if slot is None or not roster.excluded(slot):
                crews[worker.process.host] = crews.get(worker.process.host, 0) + 1
        cap = roster.limits.slots_per_host or len(world.crew)
        return sum(min(crew, cap) for crew in crews.values()) >= rules.needed(roster)


def check_end(world: World, error: BaseException) -> None:
    """Where a function is harmless, there must have been a reason why its job did not finish."""
    if not world.script.harmless or not world.script.elastic:
        return
    roster = world.driver._machine.roster
    if roster.limits.reset_limit is not None and roster.policy.resets >= roster.limits.reset_limit:
        return
    calm = world.calm.lasted
    limits, problem = world.options, f"for {calm:.2f} s nothing was wrong, but: {error}"
    if isinstance(error, ClusterLost):
        begun = world.machine is not None and world.machine.roster.starts > 0
        assert not begun or not world.scheduler.process.alive, f"the cluster was there: {error}"
    elif isinstance(error, NotEnoughWorkers):
        joinable = world.script.loops == 1
        # A rank whose process holds the GIL for so long is not missing: it may be computing.
        held = any(f.kind == "hold" and f.length >= limits.elastic_timeout for f in world.faults)
        assert held or not joinable or calm < RECOVERY + limits.heartbeat_timeout, problem
    elif isinstance(error, NoProgress):
        assert calm < RECOVERY + limits.stall_timeout, problem
    elif isinstance(error, RankFailed):
        lost = roster.outcome is not None and roster.outcome.error == "rank_lost"
        assert lost and world.faults, f"nothing explains {error!r}"  # its loop was over
    else:
        raise AssertionError(f"nothing explains {error!r}")
