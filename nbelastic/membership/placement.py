"""Who is in a plan, and with which rank. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from .model import Place, Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["arrange", "choose", "place_of", "places_of", "spread"]


class Located(Protocol):
    """Anything that runs on a slot."""

    @property
    def slot(self) -> Slot:
        """Where it runs."""


T = TypeVar("T", bound=Located)


def arrange(
    survivors: Sequence[T],
    newcomers: Sequence[T],
    *,
    most: int | None = None,
    per_host: int | None = None,
) -> list[T]:
    """Choose members and put them in the order of their ranks.

    Parameters
    ----------
    survivors : sequence
        Members of the generation before, in the order of their old ranks: taken first.
    newcomers : sequence
        The others, in the order in which they were started.
    most : int, optional
        Most members.
    per_host : int, optional
        Most members on a host.

    Returns
    -------
    list
        Ranks on one host are contiguous; hosts stand in the order of their first survivor, then
        of their first newcomer; on a host, newcomers follow survivors. So survivors keep their
        relative order.
    """
    hosts: dict[str, list[T]] = {}
    for member in choose((*survivors, *newcomers), most=most, per_host=per_host):
        hosts.setdefault(member.slot.host, []).append(member)
    return [member for crew in hosts.values() for member in crew]


def choose(
    candidates: Sequence[T], *, most: int | None = None, per_host: int | None = None
) -> list[T]:
    """Return the first of `candidates` that there is room for, in their order."""
    crews: dict[str, int] = {}
    chosen: list[T] = []
    for candidate in candidates:
        host = candidate.slot.host
        crew = crews.get(host, 0)
        if (most is None or len(chosen) < most) and (per_host is None or crew < per_host):
            crews[host] = crew + 1
            chosen.append(candidate)
    return chosen


def place_of(slots: Sequence[Slot], rank: int) -> Place:
    """Return where `rank` stands when the ranks run on `slots`."""
    host = slots[rank].host
    first = next(i for i, slot in enumerate(slots) if slot.host == host)
    local_rank = rank - first
    crews = spread(slots)
    peers = [name for name, crew in crews.items() if crew > local_rank]
    return Place(
        rank=rank,
        size=len(slots),
        local_rank=local_rank,
        local_size=crews[host],
        cross_rank=peers.index(host),
        cross_size=len(peers),
    )


def places_of(slots: Sequence[Slot]) -> list[Place]:
    """Return where each rank stands when the ranks run on `slots`: :func:`place_of` of all."""
    crews = spread(slots)
    sizes = [0] * max(crews.values(), default=0)  # by local rank: how many hosts have it
    for crew in crews.values():
        for local_rank in range(crew):
            sizes[local_rank] += 1
    local_ranks = dict.fromkeys(crews, 0)
    before = [0] * len(sizes)
    places = []
    for rank, slot in enumerate(slots):
        local_rank = local_ranks[slot.host]
        place = Place(
            rank=rank,
            size=len(slots),
            local_rank=local_rank,
            local_size=crews[slot.host],
            cross_rank=before[local_rank],
            cross_size=sizes[local_rank],
        )
        places.append(place)
        local_ranks[slot.host] += 1
        before[local_rank] += 1
    return places


def spread(slots: Sequence[Slot]) -> dict[str, int]:
    """Count the ranks on each host, hosts in the order of their first rank."""
    crews: dict[str, int] = {}
    for slot in slots:
        crews[slot.host] = crews.get(slot.host, 0) + 1
    return crews
