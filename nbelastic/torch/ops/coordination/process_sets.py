"""Process sets: some of a job's ranks, with operations of their own.

A set names ranks of the generation in which it is made. Members are remembered by what they are,
not by their numbers: after a reset the set consists of those that are left, by their new numbers.
A rank that joins the job later is in no earlier set. A set of which no member is left raises at its
next use, on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Final

from nbelastic.elastic.ranks.context import Context, at_shutdown, current
from nbelastic.elastic.ranks.groups import EVERYONE, Group, Members
from nbelastic.errors import NotInitialized
from nbelastic.torch.ops.coordination.coordination import announce


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
        if isinstance(ranks, str | bytes) or not isinstance(ranks, Iterable):
            raise ValueError(f"a ProcessSet takes a list of ranks, not {ranks!r}; there is no MPI")
        numbers = sorted(ranks)
        if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in numbers):
            raise ValueError(f"a ProcessSet takes a list of ranks, not {ranks!r}")
        if len(set(numbers)) != len(numbers) or (numbers and numbers[0] < 0):
            raise ValueError(
                f"ranks of a ProcessSet must be different numbers from 0, not {ranks!r}"
            )
        self.process_set_id: int | None = None
        self._members = Members(numbers)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self._named})"

    @property
    def _named(self) -> list[int]:
        return self._members.named

    @property
    def ranks(self) -> list[int]:
        """The ranks of its members in the present generation."""
        if self.process_set_id is None:
            return list(self._named)
        return self._members.ranks(current())

    def included(self) -> bool | None:
        """Return whether the calling rank is a member; None if the set is not added."""
        if self.process_set_id is None:
            return None
        return current().rank in self.ranks

    def rank(self) -> int | None:
        """Return the calling rank's position; None outside of the set, or before it is added."""
        if not self.included():
            return None
        return self.ranks.index(current().rank)

    def size(self) -> int | None:
        """Return the number of members; None if the set is not added."""
        return None if self.process_set_id is None else len(self.ranks)

    def _describe(self) -> str:
        return f"process set {self.process_set_id} (made of ranks {self._named})"


class _GlobalProcessSet(ProcessSet):
    """All ranks."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0
        self._members = EVERYONE

    def __repr__(self) -> str:
        return "ProcessSet(all ranks)"


global_process_set: Final = _GlobalProcessSet()


class _Registry:
    """The process sets of one rank."""

    def __init__(self) -> None:
        self.sets: weakref.WeakSet[ProcessSet] = weakref.WeakSet()
        self.next_id = 1  # 0 is the set of all ranks
        self.made_in: dict[int, set[tuple[int, ...]]] = {}


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
    known: list[ProcessSet] = [global_process_set, *_registry(current()).sets]
    for each in known:
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
    communicator = context.communicator()
    announce(communicator, "add_process_set")
    wanted = process_set._named
    ids = communicator.agree(f"add_process_set of ranks {wanted}", registry.next_id)
    made = registry.made_in.setdefault(context.generation, set())
    # Refused only after the comparison, so that all ranks refuse it together.
    absent = [rank for rank in wanted if rank >= context.size]
    if absent or not wanted:
        raise ValueError(
            f"a process set of ranks {wanted} among {context.size} ranks is impossible"
        )
    if tuple(wanted) in made or len(wanted) == context.size:
        raise ValueError(f"there is a process set of ranks {wanted} already; use that one")
    made.add(tuple(wanted))
    registry.made_in = {context.generation: made}  # earlier sets are other members by now
    process_set._members = Members(wanted, context.starts())
    process_set.process_set_id = max(ids)  # newcomers have counted fewer sets
    registry.next_id = max(ids) + 1
    registry.sets.add(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set, and return whether it was known. All ranks call this, members or not."""
    number = process_set.process_set_id
    if number is None or process_set is global_process_set:
        return False
    context = current()
    communicator = context.communicator()
    announce(communicator, "remove_process_set")
    communicator.agree(f"remove_process_set of {process_set._describe()}")
    key = group_in(context, process_set).key
    for purpose in ("", "names-", "sync-batch-norm-"):
        communicator.close_subgroup(purpose + key)
    registry = _registry(context)
    for made in registry.made_in.values():
        made.discard(tuple(process_set._named))
    registry.sets.discard(process_set)
    process_set.process_set_id = None
    process_set._members = Members(process_set._named)
    return True


def _remove_all(context: Context) -> None:
    """Remove the sets of a rank without a word to others; numbers are not used again."""
    registry = _registry(context)
    for each in registry.sets:
        each.process_set_id, each._members = None, Members(each._named)
    registry.sets.clear()
    registry.made_in = {}


at_shutdown.append(_remove_all)


def add_first_sets(process_sets: Sequence[ProcessSet | Sequence[int]]) -> None:
    """Add the sets with which a job begins, unless they are known; nothing is exchanged."""
    made = [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in process_sets]
    context = current()
    registry = _registry(context)
    known = {tuple(each._named) for each in registry.sets}
    for each in made:
        if each.process_set_id is not None or tuple(each._named) in known:
            continue  # init() again, or a clone
        known.add(tuple(each._named))
        each.process_set_id, registry.next_id = registry.next_id, registry.next_id + 1
        registry.sets.add(each)
