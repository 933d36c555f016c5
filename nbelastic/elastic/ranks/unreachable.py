"""Peers of a rank that could not be reached, and ended peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.messages import Plan

PATIENCE = 2
"""Plans in a row that do not form before peers are probed: a single one is chance."""


class UnreachablePeers:
    """Peers to name in the next ready report, because they may be why plans do not form."""

    def __init__(self, probe: Callable[[Sequence[tuple[str, int]]], list[int]]) -> None:
        self._probe = probe  # returns the positions of addresses that do not answer
        self._failures = 0
        self.unreached: tuple[int, ...] = ()  # starts of members that did not answer
        # Starts of members whose processes had ended when this rank left its last generation.
        self.gone: tuple[int, ...] = ()

    def clear(self) -> None:
        """Record that a plan has formed."""
        self._failures, self.unreached, self.gone = 0, (), ()

    def record_exits(self, plan: Plan | None, ranks: Sequence[int]) -> None:
        """Record ranks of a plan whose processes have ended."""
        self.gone = tuple(plan.members[rank].start for rank in ranks) if plan else ()

    def record_failure(self, plan: Plan, start: int) -> None:
        """Record that a plan has not formed for a start; probe its peers."""
        self._failures += 1
        if self._failures >= PATIENCE:
            others = [member for member in plan.members if member.start != start]
            silent = self._probe([member.store for member in others])
            self.unreached = tuple(others[place].start for place in silent)
