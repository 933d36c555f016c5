"""Groups of a job's ranks, formed anew in each generation: all ranks, or some.

A group of some names ranks of the generation in which it is made. Their processes are its members
from then on. In later generations it consists of the members that are left, and its members connect
at its first use. What breaks a group breaks the generation, and the other way round.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbelastic.errors import NotTheRank, OptionError

if TYPE_CHECKING:
    from nbelastic.collectives import Communicator
    from nbelastic.elastic.ranks.context import Context


ENDING_S = 1.0  # seconds for which a thread waits for the end of the one before it


class Members:
    """Ranks named in a generation, followed through later generations.

    They are those of the generation with these `starts`, or of the first one. Ranks that join later
    find no members of the first. It holds numbers only, so what has it can be copied and pickled.
    """

    def __init__(self, named: Sequence[int], starts: Sequence[int] | None = None) -> None:
        self.named = list(named)
        # What names the members for good; None until those of the first generation are asked for.
        self._starts = None if starts is None else self._named_among(starts)
        self._present: tuple[int, list[int]] = (-1, [])  # generation, and its ranks

    def ranks(self, context: Context) -> list[int]:
        """Return the present ranks of the members that are left, ascending.

        Before the first generation these are the ranks as named. A rank that does not exist is an
        :class:`OptionError`.
        """
        starts = context.starts()
        if not starts:
            return list(self.named)
        if self._starts is None:
            self._starts = self._named_among(context.first_starts())
        if self._present[0] != context.generation:
            members = set(self._starts)
            found = [rank for rank, start in enumerate(starts) if start in members]
            self._present = context.generation, found
        return list(self._present[1])

    def _named_among(self, starts: Sequence[int]) -> list[int]:
        if starts and not all(rank < len(starts) for rank in self.named):
            raise OptionError(
                f"a group of ranks {self.named} cannot be formed: there are {len(starts)} ranks"
            )
        return [starts[rank] for rank in self.named] if starts else []


class _Everyone(Members):
    def ranks(self, context: Context) -> list[int]:
        return list(range(context.size))


EVERYONE = _Everyone([])


class Group:
    """Ranks of a job, with or without this rank, and their communicator in each generation.

    By default it is of all ranks. The `key` tells it apart from other groups; `what` names it in
    messages. Its `ranks` are those of the present generation, ascending; before the first one,
    those of the first.
    """

    def __init__(
        self, context: Context, members: Members = EVERYONE, key: str = "", what: str = "all ranks"
    ) -> None:
        self.context, self.key = context, key
        self.is_global = not key
        self._members, self._what = members, what

    @classmethod
    def of_ranks(cls, context: Context, ranks: Sequence[int], name: str) -> Group:
        """Return a new group of some ranks. All ranks make the same groups in the same order.

        One of all ranks is of all that there are in later generations, too.
        """
        made = context.groups_made
        # Before its loop a rank may form at any moment, for others.
        generation = context.generation if context.loops else 0
        if made.get("generation") != generation:
            made.clear()
            made["generation"] = generation
        named = "all" if len(ranks) == context.size else ",".join(map(str, ranks))
        number = made[named] = made.get(named, 0) + 1
        starts = context.starts() if context.generation else None
        members = EVERYONE if named == "all" else Members(ranks, starts)
        return cls(context, members, f"{generation}-{number}-{named}", f"group {name!r}")

    def apart(self, purpose: str) -> Group:
        """Return a group of the same members with a communicator of its own for a purpose."""
        return Group(self.context, self._members, f"{purpose}-{self.key}", self._what)

    @property
    def ranks(self) -> list[int]:
        """The present ranks of the members that are left, ascending."""
        return self._members.ranks(self.context)

    @property
    def rank(self) -> int:
        """The position of this rank in the group; -1 if it is no member."""
        if self.is_global:
            return self.context.rank
        ranks = self.ranks
        return ranks.index(self.context.rank) if self.context.rank in ranks else -1

    @property
    def size(self) -> int:
        """The number of members that are left."""
        return self.context.size if self.is_global else len(self.ranks)

    def parent(self) -> Communicator:
        """Return the communicator of all ranks, for what is not counted as an operation of all."""
        return self.context.formed()

    def communicator(self) -> Communicator:
        """Return the communicator of the present generation, for an operation that begins.

        Of a group of all ranks the operation is counted. One of a part belongs to its first thread
        until that ends. The rank's own thread, which has made the others, does not keep it.
        """
        if self.is_global:
            return self.context.communicator()
        parent = self.parent()
        self._take_over()
        return self.connected_to(parent)

    def connected_to(self, parent: Communicator) -> Communicator:
        """Return the communicator of a part of `parent`, whose members all call this."""
        self.check_member()
        return parent if parent.size == 1 else parent.subgroup(self.ranks, self.key)

    def _take_over(self) -> None:
        """Make the calling thread the owner of operations, unless another one is."""
        context, owners = self.context, self.context.owners
        thread, owner = threading.current_thread(), owners.get(self.key)
        if owner is thread:
            return
        if context.is_ranks_thread():
            thread = context.home or thread
        if owner not in (None, thread, context.home) and not context.is_older(owner):
            with contextlib.suppress(AssertionError, RuntimeError):  # of a thread of C++
                owner.join(ENDING_S)  # as the thread of a saver, when its future has its result
            if owner.is_alive():
                raise NotTheRank(
                    f"thread {thread.name!r} called an operation on {self._what}, whose operations "
                    f"belong to thread {owner.name!r} until it ends: operations are paired with "
                    "those of other ranks by their order, which two threads do not have"
                )
        owners[self.key] = thread

    def check_member(self) -> None:
        """Refuse a rank that is not in the group."""
        ranks = self.ranks
        if not ranks:
            raise OptionError(
                f"all members of {self._what} have left the job, or it was made before this rank "
                "joined; make one of the ranks that there are, in the elastic loop"
            )
        if self.context.rank not in ranks:
            raise OptionError(
                f"rank {self.context.rank} is not in {self._what}, whose ranks are {ranks}; only "
                "its members call operations on it"
            )
