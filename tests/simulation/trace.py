"""A schedule as a text that a person can follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .world import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from .world import World


def story(seed: int, play: Callable[..., World] = simulate, option: str = "") -> str:
    """Play a schedule once more and tell what happens, and what does not hold.

    Parameters
    ----------
    seed : int
        The schedule's.
    play : callable, optional
        Plays it.
    option : str, optional
        What the command needs to play it so.
    """
    problem: BaseException | None = None
    try:
        world: Any = play(seed, tracing=True)
    except Exception as error:  # what is wrong with the schedule is what the story ends with
        problem, world = error, getattr(error, "world", None)
    lines = [f"seed {seed}"]
    if world is not None:
        lines += _setting(world)
        lines += world.hub.trace or []
    if problem is not None:
        lines.append(f"BROKEN: {type(problem).__name__}: {problem}")
    lines.append(f"again with: python -m tests.simulation 1 {option}--seed {seed} --trace")
    return "\n".join(lines)


def _setting(world: World) -> list[str]:
    faults = "".join(
        f"\n    {f.at:8.4f} {f.kind} which={f.which} for {f.length:g} s" for f in world.faults
    )
    return [
        f"  the function: {world.script}",
        f"  the options: {world.options}",
        f"  messages take {world.network.slowness:g} s, come twice with {world.network.again:g}",
        f"  the faults: {faults or 'none'}",
    ]
