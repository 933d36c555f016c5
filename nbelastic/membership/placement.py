"""Choice and order of a plan's members, as pure functions.

Members of a generation need a connection between every pair. Where some pairs have none,
:func:`choose_removed` picks a small set of ranks without which no broken pair is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from nbelastic.messages import Place, Slot

from .ranks import Rank


def arrange(survivors: Sequence[Rank], newcomers: Sequence[Rank]) -> list[Rank]:
    """Put members in the order of their ranks.

    Survivors come in the order of their old ranks, newcomers in that of their start. Ranks on one
    host are contiguous. Hosts stand in the order of their first survivor, then of their first
    newcomer; on a host, newcomers follow survivors. So survivors keep their relative order.
    """
    hosts: dict[str, list[Rank]] = {}
    for member in (*survivors, *newcomers):
        hosts.setdefault(member.slot.host, []).append(member)
    return [member for group in hosts.values() for member in group]


def choose(
    candidates: Sequence[Rank], *, most: int | None = None, per_host: int | None = None
) -> list[Rank]:
    """Return the first of `candidates` that fit within both limits, in their order."""
    counts: Counter[str] = Counter()
    chosen: list[Rank] = []
    for candidate in candidates:
        host = candidate.slot.host
        if (most is None or len(chosen) < most) and (per_host is None or counts[host] < per_host):
            counts[host] += 1
            chosen.append(candidate)
    return chosen


def choose_released(
    members: Sequence[Rank], number: int, *, keep: Rank | None = None
) -> list[Rank]:
    """Return the `number` members to leave, given oldest first; `keep` is the last of them."""
    # Small hosts are left as a whole, so that the others stay together; else the youngest leave.
    left, released = list(members), list[Rank]()
    while left and len(released) < number:
        hosts: dict[str, list[Rank]] = {}
        for member in reversed(left):
            hosts.setdefault(member.slot.host, []).append(member)
        room = number - len(released)
        whole = [group for group in hosts.values() if len(group) <= room and keep not in group]
        if whole and len(hosts) > 1:
            gone = min(whole, key=len)  # of several, the one with the youngest rank
        else:
            gone = [next((member for member in reversed(left) if member is not keep), left[-1])]
        released += gone
        left = [member for member in left if member not in gone]
    return released


def places_of(slots: Sequence[Slot]) -> list[Place]:
    """Return the places of all ranks when they run on `slots`."""
    counts = Counter(slot.host for slot in slots)
    hosts = Counter(number for count in counts.values() for number in range(count))
    local_ranks: Counter[str] = Counter()
    cross_ranks: Counter[int] = Counter()  # by local rank, as `hosts`
    places = []
    for rank, slot in enumerate(slots):
        local_rank = local_ranks[slot.host]
        place = Place(
            rank=rank,
            size=len(slots),
            local_rank=local_rank,
            local_size=counts[slot.host],
            cross_rank=cross_ranks[local_rank],
            cross_size=hosts[local_rank],
        )
        places.append(place)
        local_ranks[slot.host] += 1
        cross_ranks[local_rank] += 1
    return places


def broken_pairs(
    order: Sequence[int], unreached: Mapping[int, Sequence[int]]
) -> list[tuple[int, int]]:
    """Return each pair of ranks without a connection, as reported by either."""
    place = {start: number for number, start in enumerate(order)}
    pairs = {
        (min(one, other, key=place.__getitem__), max(one, other, key=place.__getitem__))
        for one in order
        for other in unreached.get(one, ())
        if other in place and other != one
    }
    return sorted(pairs, key=lambda pair: (place[pair[0]], place[pair[1]]))


def choose_removed(order: Sequence[int], pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Return the starts to remove so that no broken pair is left."""
    # Ranks on one host are neighbours in `order`: between two separated hosts one host goes.
    left, removed = list(pairs), []
    while left:
        counts = {start: sum(start in pair for pair in left) for start in order}
        worst = max(reversed(order), key=lambda start: counts[start])
        removed.append(worst)
        left = [pair for pair in left if worst not in pair]
    return removed
