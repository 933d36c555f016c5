"""Other jobs of the cluster, as the simulated one knows them: by its share."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from nbelastic.messages import ShareSet

if TYPE_CHECKING:
    from .world import World

MOST = 4


def have_others(world: World) -> None:
    """Have other jobs come and go: the job's share changes some times, and is lifted at last."""
    chance = random.Random(f"shares {world.seed}")  # the schedule is the same without them
    times = sorted(chance.random() * 6.0 for _ in range(chance.randint(1, 4)))
    least = world.options.limits().min_np
    for at in times:
        share = chance.randint(least, max(MOST, least))
        world.later(at, lambda share=share: _set(world, share))
    world.later(times[-1] + 3.0 * chance.random(), lambda: _set(world, None))


def _set(world: World, share: int | None) -> None:
    world.hub.say("SHARE", f"{share}")
    world.scheduler.loop.call_soon(lambda: _send(world, share))


def _send(world: World, share: int | None) -> None:
    plugin: Any = world.scheduler.plugins.get("nbelastic")
    record = None if plugin is None else plugin.jobs.get("job")
    if record is not None and not record.opening:
        record.controller.take_in(ShareSet(share, MOST, ("other",), 1))
        plugin.announce_all("job")
