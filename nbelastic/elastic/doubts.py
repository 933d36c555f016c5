"""Whom a rank cannot reach, when its plans do not form, and who it knows is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.membership import Plan

__all__ = ["Doubts"]

PATIENCE = 2
"""Plans in a row that do not form, after which it is worth looking into it: one is bad luck."""


class Doubts:
    """What a rank thinks of the other members of its plans.

    Parameters
    ----------
    probe : callable
        ``probe(addresses)`` returns the places of those that do not answer.

    Attributes
    ----------
    unreached : tuple of int
        Starts of members that this rank could not reach, to be reported.
    gone : tuple of int
        Starts of members whose processes had ended when it left its last generation.
    """

    def __init__(self, probe: Callable[[Sequence[tuple[str, int]]], list[int]]) -> None:
        self._probe = probe
        self._failures = 0
        self.unreached: tuple[int, ...] = ()
        self.gone: tuple[int, ...] = ()

    def clear(self) -> None:
        """Note that a plan has formed."""
        self._failures, self.unreached, self.gone = 0, (), ()

    def note_gone(self, plan: Plan | None, ranks: Sequence[int]) -> None:
        """Note which ranks of a plan have ended."""
        self.gone = tuple(plan.members[rank].start for rank in ranks) if plan else ()

    def raise_for(self, plan: Plan, start: int) -> None:
        """Note that a plan has not formed for the rank with this start."""
        self._failures += 1
        if self._failures >= PATIENCE:
            others = [member for member in plan.members if member.start != start]
            silent = self._probe([member.store for member in others])
            self.unreached = tuple(others[place].start for place in silent)
