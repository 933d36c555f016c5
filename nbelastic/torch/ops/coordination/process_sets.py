"""Process sets: some of a job's ranks, with operations of their own.

A set names ranks of the generation in which it is made. Members are remembered by what they are,
not by their numbers: after a reset the set consists of those that are left, by their new numbers.
A rank that joins the job later is in no earlier set. A set of which no member is left raises at its
next use, on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from nbelastic.elastic.ranks.context import Context, at_shutdown, current
from nbelastic.elastic.ranks.groups import EVERYONE, Group, Members
from nbelastic.errors import NotInitialized
from nbelastic.torch.ops.coordination.comparison import agree


class ProcessSet:
    """Some of the ranks, for operations among them.

    Pass it to ``hvd.init(process_sets=[...])`` or :func:`add_process_set`, then to operations.

    Parameters
    ----------
    ranks : sequence of int
        The ranks, in any order.

    Attributes
    ----------
    process_set_id : int or None
        None before it is added and after it is removed.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        numbers = [*ranks] if isinstance(ranks, Iterable) else [-1]
        if not all(type(rank) is int and rank >= 0 for rank in numbers) or (
            len(set(numbers)) < len(numbers)
        ):
            raise ValueError(f"a ProcessSet takes a list of different ranks, not {ranks!r}")
        self.process_set_id: int | None = None
        self._members = Members(sorted(numbers))

    def __repr__(self) -> str:
        ranks = "all" if self.process_set_id == 0 else self._members.named
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={ranks})"

    @property
    def ranks(self) -> list[int]:
        """The ranks of its members in the present generation."""
        known = self.process_set_id is not None
        return self._members.ranks(current()) if known else list(self._members.named)

    def included(self) -> bool | None:
        """Return whether the calling rank is a member; None if the set is not added."""
        return None if self.process_set_id is None else current().rank in self.ranks

    def rank(self) -> int | None:
        """Return the calling rank's position; None outside of the set, or before it is added."""
        return self.ranks.index(current().rank) if self.included() else None

    def size(self) -> int | None:
        """Return the number of members; None if the set is not added."""
        return None if self.process_set_id is None else len(self.ranks)

    def _describe(self) -> str:
        return f"process set {self.process_set_id} (made of ranks {self._members.named})"

    def _become(self, process_set_id: int | None, members: Members) -> None:
        self.process_set_id, self._members = process_set_id, members


global_process_set: Final = ProcessSet([])
global_process_set._become(0, EVERYONE)


@dataclass
class _Registry:
    """The process sets of one rank."""

    sets: weakref.WeakSet[ProcessSet] = field(default_factory=weakref.WeakSet)
    next_id: int = 1  # 0 is the set of all ranks
    made: set[tuple[int, ...]] = field(default_factory=set)  # by ranks of a generation
    generation: int = 0  # of these


_registries: weakref.WeakKeyDictionary[Context, _Registry] = weakref.WeakKeyDictionary()


def _registry(context: Context) -> _Registry:
    return _registries.setdefault(context, _Registry())


def group_in(context: Context, process_set: ProcessSet) -> Group:
    """Return the ranks of a process set, as a group of theirs."""
    if process_set.process_set_id == 0:  # also a copy of that of all ranks
        return Group(context)
    key = f"process-set-{process_set.process_set_id}"
    return Group(context, process_set._members, key, process_set._describe())


def set_of_id(process_set_id: int) -> ProcessSet:
    """Return the set with a ``process_set_id``; 0 is that of all ranks."""
    for each in (global_process_set, *_registry(current()).sets):
        if each.process_set_id == process_set_id:
            return each
    raise ValueError(f"there is no process set {process_set_id}; hvd.add_process_set() makes one")


def added_set(process_set: object) -> ProcessSet:
    """Return the process set of an argument; refuse a set that is not added."""
    if process_set is None:
        process_set = global_process_set
    if not isinstance(process_set, ProcessSet):
        raise ValueError(
            f"process_set must be a ProcessSet, not {process_set!r}; make one by "
            "hvd.add_process_set([ranks])"
        )
    if process_set.process_set_id is None:
        raise ValueError(
            f"{process_set!r} is not added, or was removed; call hvd.add_process_set() on all ranks"
        )
    if current().is_shut_down:
        raise NotInitialized("call hvd.init() again after hvd.shutdown() before operations")
    return process_set


def group_of(process_set: object) -> Group:
    """Return the group that an operation's argument `process_set` means."""
    return group_in(current(), added_set(process_set))


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a set of ranks, and return it. All ranks call this, members or not.

    Parameters
    ----------
    process_set : ProcessSet or sequence of int
        The set, or its ranks.

    Raises
    ------
    ValueError
        A rank does not exist, or a set of the same ranks was made in this generation.
    RanksDisagree
        Ranks add different sets.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    context = current()
    registry = _registry(context)
    if process_set.process_set_id is not None:
        raise ValueError(f"{process_set!r} is added already")
    wanted, verb = process_set._members.named, "add_process_set"
    text = f"{verb} of ranks {wanted}"
    ids = agree(context.communicator(), text, [registry.next_id], what=verb)
    if registry.generation != context.generation:  # earlier sets are other members by now
        registry.made, registry.generation = set(), context.generation
    # Refused only after the comparison, so that all ranks refuse it together.
    absent = [rank for rank in wanted if rank >= context.size]
    if absent or not wanted:
        raise ValueError(
            f"a process set of ranks {wanted} among {context.size} ranks is impossible"
        )
    if tuple(wanted) in registry.made or len(wanted) == context.size:
        raise ValueError(f"there is a process set of ranks {wanted} already; use that one")
    registry.made.add(tuple(wanted))
    number = max(each for (each,) in ids)  # newcomers have counted less
    process_set._become(number, Members(wanted, context.starts()))
    registry.next_id = number + 1
    registry.sets.add(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set, and return whether it was known. All ranks call this, members or not."""
    if not process_set.process_set_id:  # that of all ranks stays
        return False
    context = current()
    communicator, verb = context.communicator(), "remove_process_set"
    agree(communicator, f"{verb} of {process_set._describe()}", what=verb)
    key = group_in(context, process_set).key
    for purpose in ("", "names-", "sync-batch-norm-"):
        communicator.close_subgroup(purpose + key)
    registry = _registry(context)
    registry.made.discard(tuple(process_set._members.named))
    registry.sets.discard(process_set)
    process_set._become(None, Members(process_set._members.named))
    return True


def _remove_all(context: Context) -> None:
    """Remove the sets of a rank without a word to others; numbers are not used again."""
    registry = _registry(context)
    for each in registry.sets:
        each._become(None, Members(each._members.named))
    registry.sets.clear()
    registry.made.clear()


at_shutdown.append(_remove_all)


def add_first_sets(process_sets: Sequence[ProcessSet | Sequence[int]]) -> None:
    """Add the sets with which a job begins, unless they are known; nothing is exchanged."""
    made = [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in process_sets]
    registry = _registry(current())
    for each in made:
        known = [other._members.named for other in registry.sets]
        if each.process_set_id is None and each._members.named not in known:  # not init() again
            each.process_set_id, registry.next_id = registry.next_id, registry.next_id + 1
            registry.sets.add(each)
