"""Ranks of which some cannot reach each other: who goes on, and who is left out.

The scheduler reaches all of them, so none is lost; but a generation needs every pair of its
members to be connected. What is looked for is a small set without which no broken pair is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["broken_pairs", "outsiders"]


def broken_pairs(
    order: Sequence[int], unreached: Mapping[int, Sequence[int]]
) -> list[tuple[int, int]]:
    """Return the pairs of which either says that it cannot reach the other, each once."""
    place = {start: number for number, start in enumerate(order)}
    pairs = {
        (min(one, other, key=place.__getitem__), max(one, other, key=place.__getitem__))
        for one in order
        for other in unreached.get(one, ())
        if other in place and other != one
    }
    return sorted(pairs, key=lambda pair: (place[pair[0]], place[pair[1]]))


def outsiders(order: Sequence[int], pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Return whom to leave out so that no broken pair is left.

    Whoever is in most broken pairs goes first; of several, the last in `order`. Ranks on one host
    are neighbours in the order of ranks, so where hosts are separated, one host goes.
    """
    left, gone = list(pairs), []
    while left:
        counts = {start: sum(start in pair for pair in left) for start in order}
        worst = max(reversed(order), key=lambda start: counts[start])
        gone.append(worst)
        left = [pair for pair in left if worst not in pair]
    return gone
