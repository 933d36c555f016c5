"""What must hold: after every event of the driver's machine, and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.core import Status

from nbelastic import errors
from nbelastic import messages as ev
from nbelastic.membership import Machine, Phase, Stage, rules
from nbelastic.membership.failure_policy import SAME_KIND
from tests.membership.invariants import Checked

from .exchange import is_broken

if TYPE_CHECKING:
    from .world import World

EARLY = 4.0
"""Seconds after which nobody waits any more for a rank whose loop has ended early.

They are the wait that is called vain, and a heartbeat's interval before and after it.
"""

THOROUGH = 16  # every so many seeds the invariants that need a copy of the machine are checked, too

KNOWN_ERRORS = (
    "tests.simulation.user.Trouble",
    "nbelastic.errors.CollectiveError",
)
"""What ranks of a simulated job may raise; anything else is a bug."""


ENDING = ("collective", "return")
"""Mishaps that end the job however often they come: nothing that a reset helps against."""


class Progress:
    """The job is not reset for ever by what its ranks do, and no reset helps against."""

    def __init__(self) -> None:
        self.cause = ""
        self.members: set[int] = set()
        self.before: tuple[str, float] | None = None
        self.vain = 0

    def take(self, event: ev.Event, roster: Any) -> None:
        """Note what ranks have ended their generation with by themselves."""
        if isinstance(event, ev.RankReady) and event.own and not self.cause:
            rank = roster.ranks.get(event.start)
            if rank is not None and rank.stage == Stage.MEMBER and event.left >= rank.planned:
                self.cause = event.detail

    def check(self, effects: list[ev.Effect]) -> None:
        """The same cause is met once at a place, and any that leads nowhere a few times."""
        for plan in [effect.plan for effect in effects if isinstance(effect, ev.Publish)]:
            cause, self.cause = self.cause, ""
            members = {member.start for member in plan.members}
            if not members >= self.members:
                cause = ""  # a member was lost, too
            self.members = members
            known, version = self.before, max(plan.version, 0)
            again = cause and known is not None and version <= known[1] + 1
            self.vain = self.vain + 1 if again else 0
            assert not again or known is None or cause != known[0], f"{cause} again at {version}"
            assert self.vain < SAME_KIND, f"{self.vain} resets in a row without progress: {cause}"
            self.before = (cause, version) if cause else None


def watch_early(world: World, start: int, generation: int) -> None:
    """A rank has come to the end of its loop early: who waits for it does not do so for long."""

    def look() -> None:
        roster = world.machine.roster if world.machine is not None else None
        if roster is None or world.troubled or world.slow or any(world.busy):
            return
        if any(fault.kind in ("hold", "stop", "stop_worker", "slow") for fault in world.faults):
            return  # what is late is not known to wait, or began to wait late
        if not world.scheduler.process.alive:
            return  # nothing is decided any more
        here = roster.generation == generation and roster.phase == Phase.RUNNING
        done = [rank.start for rank in roster.in_stage(Stage.DONE)]
        if roster.any_leaving:
            return  # a worker that closes sends no heartbeats; its leave has a limit of its own
        waiting = [rank.start for rank in roster.in_stage(Stage.MEMBER) if rank.waiting]
        late = here and start in done and waiting
        world.hub.require(not late, f"{waiting} wait for start {start}, whose loop has ended")

    world.later(EARLY, look)


def watch_hang(world: World, start: int) -> None:
    """A rank hangs: if others wait for it, they must not have to for long."""
    limit = world.options.stall_timeout

    def look() -> None:
        actor = world.actors[start]
        roster = world.machine.roster if world.machine is not None else None
        if roster is None or world.troubled or world.slow or not actor.fiber.process.alive:
            return
        if any(fault.kind == "hold" for fault in world.faults):
            return  # who holds the GIL may be computing: it does not count as one that waits
        members = [rank.start for rank in roster.awaited()]
        free = [s for s in members if not world.actors[s].hanging]
        late = start in members and free and roster.phase == Phase.RUNNING
        world.hub.require(not late, f"{free} wait for start {start}, which hangs")

    world.later(2.5 * limit + 5.0, look)


class WatchedMachine(Checked):
    """The scheduler's copy of a job's machine, with its invariants checked after every event."""

    def __init__(self, world: World, machine: Machine) -> None:
        super().__init__(machine.roster.limits)
        self.world, self.machine = world, machine
        self.thorough = world.seed % THOROUGH == 0
        self.done: set[tuple[int, int]] = set()
        self.fenced: set[int] = set()
        self.generation = self.trained = 0
        self.progress = Progress()

    def handle(self, event: ev.Event, now: float, chance: float = 0.0) -> list[ev.Effect]:
        ending = [rank.start for rank in self.roster.in_stage(Stage.ENDING)]
        self.generation = self.roster.generation
        if self.roster.phase == Phase.RUNNING:
            self.trained = self.generation
        self.progress.take(event, self.roster)
        try:
            effects = super().handle(event, now, chance)
            self.progress.check(effects)
            self.check_fenced(ending, effects)
            self.check_costs(event, effects)
            self.check_release(event, effects)
        except AssertionError as error:
            self.world.hub.require(False, f"after {event}: {error!r}")
            raise
        if self.world.hub.trace is not None:
            self._write(event, effects)
        return effects

    def check_fenced(self, ending: list[int], effects: list[ev.Effect]) -> None:
        """Who was told to end never takes part again, and nobody is left in an old generation."""
        ranks = self.roster.ranks
        back = [start for start in ending if start in ranks and ranks[start].stage != Stage.ENDING]
        assert not back, f"{back} were told to end, and are back"
        for effect in effects:
            if isinstance(effect, ev.EndRank):
                self.fenced.add(effect.start)
            elif isinstance(effect, ev.Publish):
                back = [m.start for m in effect.plan.members if m.start in self.fenced]
                assert not back, f"{back} were told to end, and are planned"
                self.check_let_go(effect.plan.generation)

    def check_let_go(self, generation: int) -> None:
        """Whoever counts has no connection of an older generation any more."""
        world = self.world
        for start in set(self.roster.ranks) - self.fenced:
            actor = world.actors.get(start)
            if actor is not None and actor.fiber.process.alive:
                held = world.exchange.open.get(actor.fiber)
                free = held is None or held.generation >= generation or is_broken(held)
                assert free, f"start {start} is still in generation {held and held.generation}"

    def check_release(self, event: ev.Event, effects: list[ev.Effect]) -> None:
        """The elastic loop is over for all members at once, when all have come to its end."""
        if isinstance(event, ev.LoopDone):
            self.done.add((event.start, event.generation))
        for effect in effects:
            if isinstance(effect, ev.Release):
                early = [s for s in effect.starts if (s, effect.generation) not in self.done]
                assert not early, f"{early} are still in their loop"

    def check_costs(self, event: ev.Event, effects: list[ev.Effect]) -> None:
        """A fault on one worker costs no other its process; a planned change costs nothing."""
        world = self.world
        trained = self.trained and self.trained == self.generation
        if world.only_planned and trained and isinstance(event, ev.RankReady):
            assert event.version == ev.FRESH or not event.failed, (
                "a planned change has rolled somebody back"
            )
        for effect in effects:
            if isinstance(effect, ev.RestartWorker) and world.script.harmless:
                assert world.touched(effect.slot.id), f"{effect.slot.id} had no fault: {effect}"

    def copy(self) -> Any:
        return super().copy() if self.thorough else None

    def check_1_old_messages(self, machine: Any, *args: Any) -> None:
        if machine is not None:
            super().check_1_old_messages(machine, *args)

    def check_8_fault_isolated(self, event: Any, machine: Any, *args: Any) -> None:
        if machine is not None:
            super().check_8_fault_isolated(event, machine, *args)

    def _write(self, event: ev.Event, effects: list[ev.Effect]) -> None:
        kind = type(event).__name__
        if effects or kind not in ("Tick", "Beats"):
            self.world.hub.say("machine", f"{event}")
        for effect in effects:
            self.world.hub.say("machine", f"    -> {effect}  [{self.roster.phase.value}]")


def is_endless(world: World) -> bool:
    """Whether it is for the job's owner to end it: the function fails for ever, or nobody waits
    for a rank that hangs."""
    if any(m.times > 1 and m.kind not in ENDING for m in world.script.mishaps):
        return True
    roster = world.machine.roster if world.machine is not None else None
    members = roster.members() if roster is not None and roster.phase == Phase.RUNNING else []
    return bool(members) and all(world.actors[rank.start].hanging for rank in members)


def check_outcome(world: World) -> None:
    """The outcome must be one that what happened explains."""
    future, script = world.driver.future, world.script
    for failure in world.driver.log.failures.values():
        known = failure.summary.startswith((*KNOWN_ERRORS, *world.known_errors))
        assert known, f"a rank raised {failure.summary}\n{failure.frames}"
    error = future.exception()
    if error is None:
        results = future.result()
        assert len(set(results)) == 1, f"ranks returned different results: {results}"
        steps = script.steps if not (script.elastic and script.samples) else results[0][0]
        expected = results[0] == "early" or results[0][0] == steps
        assert expected, f"the result is {results[0]}, after {script.steps} steps"
        check_version(world)
        return
    assert isinstance(error, errors.JobError), f"not an outcome: {error!r}"
    if isinstance(error, errors.JobStopped):
        assert world.stopped, "stopped by nobody"
        return
    assert type(error) is not errors.JobError, f"the driver failed: {error!r} {error.__cause__!r}"
    check_end(world, error)


def check_version(world: World) -> None:
    """The committed version at the end is the highest that a surviving rank has told of."""
    roster = world.driver._machine.roster  # the scheduler's copy may be late
    crew = roster.outcome.starts if roster.outcome is not None else ()
    told = [v for (start, _, v) in world.ledger if start in crew]
    if told and roster.plan is not None and roster.plan.loop > 0:
        assert roster.version == max(told), f"ends with {roster.version}, told of {max(told)}"


def leftovers(world: World) -> list[str]:
    """Return what is left of the job."""
    scheduler, kernels = world.scheduler, world.kernels
    found = _left_at_scheduler(world) if scheduler.process.alive else []
    if kernels.driving:
        found += [f"the future {key}" for key in kernels.client.futures]
        found += [f"the topic {topic}" for topic in kernels.client._event_handlers]
    for worker in world.living():
        if worker.process.frozen:
            continue
        if not scheduler.process.alive:
            found.append(f"{worker.id}, which has no scheduler")
        found += [f"the thread {fiber.name}" for fiber in worker.process.fibers]
        agent = worker.plugins.get("nbelastic")
        if agent is not None and (agent._ranks or agent._beats.running):
            found.append(f"ranks of {worker.id}")
        found += [f"the process {rank.process.name}" for rank in worker.ranks]
    for client in scheduler.everybody:
        if client.process.alive:
            found += [f"the thread {fiber.name}" for fiber in client.process.fibers]
    for client, driver in kernels.former:
        if client.process.alive and not driver.future.done():
            found.append(f"the driver of {client.id}")
    return found


def _left_at_scheduler(world: World) -> list[str]:
    plugin: Any = world.scheduler.plugins.get("nbelastic")
    if plugin is None:  # its kernel was gone before it came to that
        return []
    found = [f"the job {name!r} on the scheduler" for name in plugin.jobs]
    for host in plugin.workers.values():
        if host.holder is not None and world.reachable(host.slot.id):
            found.append(f"the slot {host.slot.id}, held by {host.holder}")
    return found + [f"the task {key}" for key in world.scheduler.tasks]


# -- when all was well, a job has to finish -------------------------------------------------------

INTERVAL = 0.25  # seconds between two looks

RECOVERY = 2.0
"""Seconds, beyond its timeouts, that a job needs to come back from what has happened to it."""


class Calm:
    """Watches since when nothing has been in a job's way."""

    def __init__(self, world: World) -> None:
        self._world = world
        # When something last was, and for how long nothing was until the driver knew the job's end.
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
    if isinstance(error, errors.ClusterLost):
        begun = world.machine is not None and world.machine.roster.starts > 0
        assert not begun or not world.scheduler.process.alive, f"the cluster was there: {error}"
    elif isinstance(error, errors.NotEnoughWorkers):
        joinable = world.script.loops == 1
        # A rank whose process holds the GIL for so long is not missing: it may be computing.
        held = any(f.kind == "hold" and f.length >= limits.elastic_timeout for f in world.faults)
        assert held or not joinable or calm < RECOVERY + limits.heartbeat_timeout, problem
    elif isinstance(error, errors.NoProgress):
        assert calm < RECOVERY + limits.stall_timeout, problem
    elif isinstance(error, errors.RankFailed):
        lost = roster.outcome is not None and roster.outcome.error == "rank_lost"
        assert lost and world.faults, f"nothing explains {error!r}"  # its loop was over
    else:
        raise AssertionError(f"nothing explains {error!r}")
