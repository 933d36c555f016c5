"""A small grammar of programs, and what must come of them.

A program is a list of steps for each rank. All begin as the same list of operations; then some
ranks forget a step, add one, exchange two, change a type, a shape, a reduction, a root or a name,
call from a second thread, raise or return early. Ranks that disagree go on with their next step, or
end, as the program says. In a program with names, these decide which operations match, and what
comes of one that has no match depends on all the rest: its ranks end with their first error.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

DTYPES = ("float32", "float64", "float16", "int32", "int64")
SHAPES = ((), (0,), (1,), (3,), (2, 3), (3, 2), (5000,), (70_000,))
REDUCTIONS = ("Sum", "Average", "Min", "Max")
TENSOR = {"dtype", "shape"}
FIELDS: dict[str, set[str]] = {
    "allreduce": {*TENSOR, "reduction", "name"},
    "grouped_allreduce": {*TENSOR, "reduction"},
    "broadcast": {*TENSOR, "root", "name"},
    "allgather": {*TENSOR, "name"},
    "alltoall": TENSOR,
    "reducescatter": {*TENSOR, "reduction"},
    "barrier": set(),
    "broadcast_object": {"root", "name"},
    "allgather_object": set(),
    "broadcast_parameters": {*TENSOR, "root"},
}
"""Of each operation what must be the same on all ranks."""

KINDS = tuple(FIELDS)
WITH_ROWS = {"allgather", "alltoall", "reducescatter"}


@dataclass(frozen=True)
class Step:
    """What a rank does: one of `KINDS`, ``raise`` or ``return``. What is not used is as it is."""

    kind: str
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    reduction: str = "Sum"
    root: int = 0
    name: str | None = None
    begun_only: bool = False
    second_thread: bool = False

    def compared(self) -> tuple[object, ...]:
        """Return what must be the same on all ranks."""
        named = {field: getattr(self, field) for field in sorted(FIELDS[self.kind])}
        if self.kind in ("allgather", "alltoall"):  # whose first axis may differ
            named["shape"] = self.shape[1:]
        return (self.kind, *named.values())


@dataclass(frozen=True)
class Program:
    """What each rank does, and whether it goes on after a disagreement."""

    seed: int
    ranks: tuple[tuple[Step, ...], ...]
    goes_on: bool

    @property
    def has_names(self) -> bool:
        """Whether operations of any rank are matched by their names."""
        steps = (step for steps in self.ranks for step in steps if step.name is not None)
        return any("name" in FIELDS.get(step.kind, ()) for step in steps)


def program(seed: int, names: bool = False) -> Program:
    """Return the program of a seed, with names or without."""
    chance = random.Random(seed)
    size = chance.choice((2, 2, 3))
    common = [_operation(chance, size, names) for _ in range(chance.randint(1, 6))]
    ranks = [list(common) for _ in range(size)]
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        _change(chance, chance.choice(ranks), size, names)
    return Program(seed, tuple(map(tuple, ranks)), not names and chance.random() < 0.6)


def _operation(chance: random.Random, size: int, names: bool) -> Step:
    kind = chance.choice(KINDS)
    shape = chance.choice(SHAPES)
    if kind in WITH_ROWS:
        shape = (chance.choice((0, 1, 2)) * size, *shape[1:])
    return Step(
        kind=kind,
        dtype=chance.choice(DTYPES),
        shape=shape,
        reduction=chance.choice(REDUCTIONS),
        root=chance.randrange(size),
        name=chance.choice((None, "loss", "ä", "λ", "step 1")) if names else None,
        begun_only=kind in ("allreduce", "broadcast", "allgather") and chance.random() < 0.4,
    )


def _change(chance: random.Random, steps: list[Step], size: int, names: bool) -> None:
    how = chance.choice(
        ("drop", "add", "swap", "field", "field", "field", "raise", "return", "thread")
    )
    where = chance.randrange(len(steps)) if steps else 0
    if how == "add" or not steps:
        steps.insert(where, _operation(chance, size, names))
    elif how == "drop":
        del steps[where]
    elif how == "swap":
        other = chance.randrange(len(steps))
        steps[where], steps[other] = steps[other], steps[where]
    elif how == "thread" and steps[where].kind in KINDS:
        steps[where] = dataclasses.replace(steps[where], second_thread=True, begun_only=False)
    elif how == "field":
        other_step = _operation(chance, size, names)
        field = chance.choice(("dtype", "shape", "reduction", "root", "name"))
        value = getattr(other_step, field)
        if field == "shape" and steps[where].kind in WITH_ROWS:
            value = (steps[where].shape[0], *value[1:])
        steps[where] = dataclasses.replace(steps[where], **{field: value})
    elif how in ("raise", "return"):
        steps.insert(where, Step(how))
