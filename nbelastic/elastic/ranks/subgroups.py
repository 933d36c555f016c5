"""Groups of some of a job's ranks, formed anew in each generation.

A group names ranks of the generation in which it is made. Their processes are its members from then
on. In later generations it consists of the members that are left, and its members connect at its
first use. What breaks a group breaks the generation, and the other way round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.collectives import SoloCommunicator
from nbelastic.errors import NbelasticError, OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.collectives import Communicator
    from nbelastic.elastic.ranks.context import Context


class Members:
    """Ranks that were named in one generation, followed through later ones.

    It holds numbers only, so what has it can be copied and pickled.
    """

    def __init__(self, named: Sequence[int]) -> None:
        self.named = list(named)
        self._starts: list[int] | None = None  # what names the members for good
        self._present: tuple[int, list[int]] = (-1, [])  # generation, and its ranks

    def bind(self, context: Context) -> None:
        """Take ranks of the present generation for good; all ranks call this in it."""
        self._take(context.starts())

    def bind_to_first(self, context: Context) -> None:
        """Take ranks of the first generation for good, as soon as that has formed.

        Ranks that join later have another first generation, so they find no members.
        """
        if context.starts():
            self._take_first(context)
            return

        def formed() -> None:
            context.after_forming = tuple(e for e in context.after_forming if e is not formed)
            self._take_first(context)

        context.after_forming += (formed,)

    def ranks(self, context: Context) -> list[int]:
        """Return the present ranks of the members that are left, ascending.

        Before the first generation these are the ranks as named. A rank that does not exist is an
        :class:`OptionError`.
        """
        starts = context.starts()
        if not starts:
            return list(self.named)
        if self._starts is None:  # a copy of members that were not bound yet
            self._take_first(context)
        if self._starts is None:
            raise OptionError(
                f"a group of ranks {self.named} cannot be formed: there are {len(starts)} ranks"
            )
        if self._present[0] != context.generation:
            members = set(self._starts)
            found = [rank for rank, start in enumerate(starts) if start in members]
            self._present = context.generation, found
        return list(self._present[1])

    def _take_first(self, context: Context) -> None:
        if context.came_later():
            self._starts = []
        else:
            self._take(context.starts())

    def _take(self, starts: list[int]) -> None:
        self._present = (-1, [])
        if all(rank < len(starts) for rank in self.named):
            self._starts = [starts[rank] for rank in self.named]


class Subgroup:
    """Some ranks of a job, this one among them or not, and their communicator.

    All ranks make the same groups in the same order. `ranks` are those of the present generation,
    ascending; before the first one, those of the first. `name` is for messages.
    """

    def __init__(self, context: Context, ranks: Sequence[int], name: str) -> None:
        self.name = name
        self._context = context
        self._members = Members(ranks)
        self._formed: tuple[int, Communicator, Communicator] | None = None
        made = context.groups_made
        if made.get("generation") != context.generation:
            made.clear()
            made["generation"] = context.generation
        named = ",".join(map(str, ranks))
        number = made[named] = made.get(named, 0) + 1
        self._key = f"{context.generation}-{number}-{named}"
        if context.generation:
            self._members.bind(context)
        else:
            self._members.bind_to_first(context)

    @property
    def ranks(self) -> list[int]:
        """The present ranks of the members that are left, ascending."""
        return self._members.ranks(self._context)

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
        """Return the group's communicator of the present generation; members connect."""
        context = self._context
        whole = context.communicator()
        context.exchanges -= 1  # it is no operation of all ranks
        if self._formed is not None and self._formed[0] == context.generation:
            return self._formed[2]
        ranks = self.ranks
        if not ranks:
            raise NbelasticError(
                f"group {self.name!r} has no members any more: all {len(self._members.named)} are "
                "gone, or it was made before this rank joined; make groups in the elastic loop"
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
