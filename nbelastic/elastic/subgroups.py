"""Groups of some of a job's ranks, formed anew in each generation.

A group names ranks of the generation in which it is made. Their processes are its members from then
on. In later generations it consists of the members that are left, in their order, and its members
connect at its first use. What breaks a group breaks the generation, and the other way round.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from nbelastic.collectives import SoloCommunicator
from nbelastic.errors import NbelasticError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.collectives import Communicator
    from nbelastic.elastic.context import Context

__all__ = ["Subgroup"]


class Subgroup:
    """Some ranks of a job, this one among them or not.

    All ranks make the same groups in the same order.

    Parameters
    ----------
    context : Context
        That of this rank.
    ranks : sequence of int
        Ranks of the present generation, ascending. Before the first one, those of the first.
    name : str
        For messages.
    """

    def __init__(self, context: Context, ranks: Sequence[int], name: str) -> None:
        self.name = name
        self._context = context
        self._named = list(ranks)
        self._members: list[int] | None = None  # numbers of their starts
        self._key = ""
        self._formed: tuple[int, Communicator, Communicator] | None = None
        if context.generation:
            self._bind()

    @property
    def ranks(self) -> list[int]:
        """The present ranks of the members that are left, in their order."""
        if self._members is None:
            if not self._context.generation:
                return list(self._named)
            self._bind()
        assert self._members is not None
        places = {start: rank for rank, start in enumerate(self._context.starts())}
        return [places[start] for start in self._members if start in places]

    @property
    def rank(self) -> int:
        """The position of this rank in the group; -1 if it is no member."""
        ranks = self.ranks
        return ranks.index(self._context.rank) if self._context.rank in ranks else -1

    @property
    def size(self) -> int:
        """The number of members that are left."""
        return len(self.ranks)

    def communicator(self) -> Communicator:
        """Return the group's communicator of the present generation; members connect.

        Raises
        ------
        NbelasticError
            All members are gone, or this rank is none.
        """
        context = self._context
        whole = context.communicator()
        if self._formed is not None and self._formed[0] == context.generation:
            return self._formed[2]
        ranks = self.ranks
        if not ranks:
            raise NbelasticError(
                f"group {self.name!r} has no members any more: all {len(self._named)} are gone"
            )
        if context.rank not in ranks:
            raise NbelasticError(
                f"rank {context.rank} is no member of group {self.name!r}, which has {ranks}"
            )
        made: Communicator = SoloCommunicator(generation=context.generation)
        if len(ranks) > 1:
            made = whole.subgroup(ranks, self._key)
        self._formed = context.generation, whole, made
        return made

    def close(self) -> None:
        """Close the communicator; the group is not used any more."""
        formed, self._formed = self._formed, None
        if formed is not None:
            formed[1].close_subgroup(self._key)

    def _bind(self) -> None:
        """Take the ranks of the present generation as the members for good."""
        context = self._context
        starts = context.starts()
        self._members = [starts[rank] for rank in self._named]
        made = context.groups_made
        if made.get("generation") != context.generation:
            made.clear()
            made["generation"] = context.generation
        members = ",".join(map(str, self._members))
        number = made[members] = made.get(members, 0) + 1
        digest = hashlib.blake2b(members.encode(), digest_size=8).hexdigest()
        self._key = f"{context.generation}-{number}-{digest}"
