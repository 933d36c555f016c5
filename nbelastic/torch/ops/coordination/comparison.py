"""Beginning of an operation: ranks compare and then launch it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from nbelastic.elastic.ranks.timeline import now, timeline
from nbelastic.errors import RanksDisagree
from nbelastic.torch.ops.coordination.coordination import (
    JOINED,
    announce,
    coordination_of,
    coordination_over,
    not_with_join,
)
from nbelastic.torch.ops.operation.tensor_operations import Pending, TensorOperation, in_words

if TYPE_CHECKING:
    from nbelastic.collectives import Communicator
    from nbelastic.elastic.ranks.groups import Group

T = TypeVar("T")


def begin(group: Group, operation: TensorOperation[T], name: str | None = None) -> Pending[T]:
    """Begin an operation among a group's ranks, matched by its name or by the order of calls."""
    if timeline.marks_cycles:
        timeline.instant("CYCLE_START")
    coordination = None
    with timeline.span(f"NEGOTIATE_{operation.verb.upper()}", name):
        if name is not None and group.size > 1:
            # One of all ranks counts as an operation of this rank, in whatever order it begins.
            coordination = coordination_of(
                group.communicator() if group.is_global else group.parent()
            )
        if name is not None and coordination is not None:
            group.check_member()
            pending = coordination.offer(group, name, operation)
        else:
            communicator = group.communicator()
            what = (operation.spec or operation.verb) if group.is_global else None
            foreseen = operation.can_be_foreseen
            numbers = agree(
                communicator, operation.pattern, operation.numbers, what=what, foreseen=foreseen
            )
    if coordination is None:
        with timeline.span("MEMCPY_IN_FUSION_BUFFER", name):
            operation.load_on(communicator.rank, communicator.size)
        pending = Pending(operation.launch(communicator, numbers), operation.store)
    if not timeline.is_on:
        return pending
    verb, begun = operation.verb, now()

    def finish() -> T:
        result = pending.wait()
        timeline.add_span(verb.upper(), begun, f"{verb}.{name}" if name else verb)
        return result

    return Pending([pending], finish)


def agree(
    communicator: Communicator,
    pattern: Any,
    numbers: Sequence[int] = (),  # may differ, and are equally many on all ranks
    *,
    what: object = None,  # told to joined ranks, if the operation is of all ranks
    foreseen: bool = False,  # by all ranks: not compared, if it may
) -> list[Sequence[int]]:
    """Compare on all ranks what they are about to do; return the numbers of each."""
    if what is not None:
        announce(communicator, what)
    if foreseen and communicator.size == 1:
        return []
    if foreseen:
        history = communicator.history
        if not communicator.capabilities.carries_descriptions:  # records must not meet Gloo's data
            coordination_over(communicator).compare(communicator, pattern)
        elif history.foresees(pattern):
            history.add(pattern)
        else:
            communicator.agree(in_words(pattern), pattern=pattern)
        return []
    text = in_words(pattern)
    try:
        # A single number rides on the comparison, and saves an exchange.
        firsts = communicator.agree(text, numbers[0] if len(numbers) == 1 else 0)
    except RanksDisagree as error:
        if joined := [rank for rank, (side, _) in enumerate(error.sides) if side == JOINED]:
            raise not_with_join(text, joined) from None
        raise
    if len(numbers) <= 1:
        return [(first,) for first in firsts]
    return gather_numbers(communicator, numbers)


def gather_numbers(communicator: Communicator, numbers: Sequence[int]) -> list[Sequence[int]]:
    """Return the numbers of each rank, equally many."""
    layout = struct.Struct(f"{len(numbers)}q")
    everyone = communicator.allgather_bytes(layout.pack(*numbers))
    return [layout.unpack(each) for each in everyone]
