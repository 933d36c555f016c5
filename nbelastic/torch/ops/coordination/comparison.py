"""Beginning of an operation: ranks compare and then launch it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeVar

from nbelastic.elastic.ranks.timeline import now, timeline
from nbelastic.errors import RanksDisagree
from nbelastic.torch.ops.coordination.coordination import (
    JOINED,
    announce,
    compare,
    coordination_of,
    not_with_join,
)
from nbelastic.torch.ops.operation import description
from nbelastic.torch.ops.operation.tensor_operations import Pending

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.collectives import Communicator
    from nbelastic.elastic.ranks.groups import Group
    from nbelastic.torch.ops.operation.tensor_operations import TensorOperation

T = TypeVar("T")


def begin(group: Group, operation: TensorOperation[T], name: str | None = None) -> Pending[T]:
    """Begin an operation among the ranks of a group.

    With a name it waits, in the background, for the operation of that name on the other ranks.
    Without one, this call waits for the other ranks, which call the same operations in the same
    order.

    Ranks that are not about to do the same have RanksDisagree, with a name when they wait for the
    operation. One name serves one operation at a time.
    """
    if timeline.marks_cycles:
        timeline.instant("CYCLE_START")
    with timeline.span(f"NEGOTIATE_{operation.verb.upper()}", name):
        if name is not None and group.size > 1:
            # One of all ranks counts as an operation of this rank, in whatever order it begins.
            all_ranks = group.communicator() if group.is_global else group.parent()
            coordination = coordination_of(all_ranks)
            if coordination is not None:
                if not group.is_global:
                    group.check_member()
                pending = coordination.offer(group, name, operation)
                return _recorded(pending, operation.verb, name) if timeline.is_on else pending
        communicator = group.communicator()
        numbers = agree(
            communicator,
            operation.pattern,
            operation.numbers,
            what=(operation.spec or operation.verb) if group.is_global else None,
            foreseen=operation.can_be_foreseen,
        )
    with timeline.span("MEMCPY_IN_FUSION_BUFFER", name):
        operation.load_on(communicator.rank, communicator.size)
    pending = Pending(operation.launch(communicator, numbers), operation.store)
    return _recorded(pending, operation.verb, name) if timeline.is_on else pending


def _recorded(pending: Pending[T], verb: str, name: str | None) -> Pending[T]:
    """Return the pending operation; the timeline records its end."""
    begun = now()

    def finish() -> T:
        result = pending.wait()
        timeline.add_span(verb.upper(), begun, f"{verb}.{name}" if name else verb)
        return result

    return Pending([pending], finish)


def agree(
    communicator: Communicator,
    pattern: Any,
    numbers: Sequence[int] = (),
    *,
    what: object = None,
    foreseen: bool = False,
) -> list[Sequence[int]]:
    """Compare on all ranks what they are about to do; return the numbers of each.

    The `numbers` may differ, and are equally many on all ranks. If the operation is of all ranks, a
    rank that has joined is told `what`. What all ranks have `foreseen` is not compared, if it may.
    """
    if what is not None:
        announce(communicator, what)
    if foreseen:
        compare(communicator, pattern)
        return []
    text = description.in_words(pattern)
    try:
        firsts = communicator.agree(text, numbers[0] if len(numbers) == 1 else 0)
    except RanksDisagree as error:
        if JOINED in str(error):
            raise not_with_join(text, _joined_in(str(error))) from None
        raise
    if len(numbers) <= 1:
        return [(first,) for first in firsts]
    return gather_numbers(communicator, numbers)


def gather_numbers(communicator: Communicator, numbers: Sequence[int]) -> list[Sequence[int]]:
    """Return the numbers of each rank, equally many."""
    layout = struct.Struct(f"{len(numbers)}q")
    everyone = communicator.allgather_bytes(layout.pack(*numbers))
    return [layout.unpack(each) for each in everyone]


def _joined_in(message: str) -> list[int]:
    """Return the ranks that have joined, by the message of a comparison."""
    sides = [side for side in message.split("; ") if side.endswith(JOINED)]
    words = sides[0].rpartition("rank")[2].partition(":")[0].lstrip("s ")
    return [int(word) for word in words.split(", ") if word.isdecimal()]
