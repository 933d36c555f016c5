"""Playing a program on real communicators, and judging what came of it."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import nbelastic.torch as hvd
from nbelastic.collectives import Rendezvous, RendezvousServer
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import CollectiveError, NotTheRank, RanksDisagree
from tests.collectives.worlds import BIND, MAKERS
from tests.support.world import StaticContext

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbelastic.collectives import Communicator

    from .programs import Program, Step

LIMIT_S = 30.0
"""How long a program may take."""


class Raised(Exception):
    """What a rank raises by itself."""


@dataclass
class Course:
    """What a rank has gone through: a result or an error for each step, and how it ended."""

    steps: list[Any] = field(default_factory=list)
    end: BaseException | None = None


def play(program: Program, kind: str) -> list[Course]:
    """Run a program; a rank that does not end in time has no `end` and is said to hang."""
    courses = [Course(end=TimeoutError("it hangs")) for _ in program.ranks]
    with _communicators(kind, len(program.ranks)) as communicators:
        threads = [
            threading.Thread(
                target=_Rank(program, rank, communicators, courses[rank]).main,
                name=f"campaign-rank-{rank}",
                daemon=True,
            )
            for rank in range(len(program.ranks))
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + LIMIT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        courses = [Course(list(each.steps), each.end) for each in courses]  # as it was in time
        for communicator in communicators:
            communicator.abort("the program is over")
        for thread in threads:
            thread.join()
    return courses


@contextlib.contextmanager
def _communicators(kind: str, size: int) -> Iterator[list[Communicator]]:
    store = RendezvousServer(BIND)
    made = [
        MAKERS[kind](
            Rendezvous(
                job="campaign",
                generation=1,
                rank=rank,
                size=size,
                store=store.address,
                bind=BIND,
                timeout_s=2 * LIMIT_S,
            )
        )
        for rank in range(size)
    ]

    def connect(rank: int) -> None:
        made[rank] = made[rank].connect()

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield made
    finally:
        for communicator in made:
            communicator.close()
        store.close()


class _Rank:
    """A rank, in its thread. The driver's part is here, too: it aborts where a rank has raised."""

    def __init__(
        self, program: Program, rank: int, communicators: list[Communicator], course: Course
    ) -> None:
        self._program = program
        self._rank = rank
        self._all = communicators
        self._course = course
        self._begun: list[tuple[int, Any]] = []

    def main(self) -> None:
        own = self._all[self._rank]
        try:
            with activate(StaticContext(own)):
                self._run()
            own.close()
            self._course.end = None
        except BaseException as error:
            self._course.end = error
            for communicator in self._all:
                communicator.abort(f"rank {self._rank} failed: {type(error).__name__}: {error}")

    def _run(self) -> None:
        # Operations belong to this thread from the start, whatever a second one calls first.
        hvd.barrier()
        for number, step in enumerate(self._program.ranks[self._rank]):
            if step.kind == "return":
                break
            if step.kind == "raise":
                raise Raised(f"by itself in step {number}")
            self._course.steps.append(self._outcome(number, step))
        for number, handle in self._begun:
            self._course.steps[number] = _plain(handle.wait())

    def _outcome(self, number: int, step: Step) -> Any:
        try:
            if step.second_thread:
                return _in_thread(lambda: _call(step, self._rank, number))
            result = _call(step, self._rank, number)
        except RanksDisagree as error:
            if not self._program.goes_on:
                raise
            return error
        if step.begun_only:
            self._begun.append((number, result))
            return None
        return _plain(result)


def _in_thread(function: Any) -> Any:
    outcome: list[Any] = []

    def main() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(main,), name="second")
    thread.start()
    thread.join()
    return outcome[0]


def _value(rank: int, number: int) -> int:
    return rank + number + 1


def _tensor(step: Step, rank: int, number: int) -> torch.Tensor:
    value = _value(rank, number)
    return torch.full(step.shape, value, dtype=getattr(torch, step.dtype))


def _call(step: Step, rank: int, number: int) -> Any:
    """Do an operation and return its result, or its handle."""
    reduction = getattr(hvd, step.reduction)
    tensor = _tensor(step, rank, number)
    match step.kind:
        case "allreduce":
            function = hvd.allreduce_async if step.begun_only else hvd.allreduce
            return function(tensor, name=step.name, op=reduction)
        case "grouped_allreduce":
            return hvd.grouped_allreduce([tensor, tensor], op=reduction)
        case "broadcast":
            function = hvd.broadcast_async if step.begun_only else hvd.broadcast
            return function(tensor, step.root, name=step.name)
        case "allgather":
            function = hvd.allgather_async if step.begun_only else hvd.allgather
            return function(tensor, name=step.name)
        case "alltoall":
            return hvd.alltoall(tensor)
        case "reducescatter":
            return hvd.reducescatter(tensor, op=reduction)
        case "barrier":
            return hvd.barrier()
        case "broadcast_object":
            return hvd.broadcast_object(f"{rank}/{number}", step.root, name=step.name)
        case "allgather_object":
            return hvd.allgather_object(f"{rank}/{number}")
        case "broadcast_parameters":
            return hvd.broadcast_parameters({"weight": tensor}, step.root) or tensor
    raise AssertionError(step.kind)


def _plain(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.unique().tolist(), result.numel(), str(result.dtype)
    if isinstance(result, list):
        return [_plain(each) for each in result]
    return result


# -- what must have come of it ---------------------------------------------------------------------

_ENDS = ("raise", "return")
_CAUSES = (
    "failed: Raised",
    "failed: RanksDisagree",
    "failed: ValueError: dup",
    "is closed",
    "has left",
    "peer",
    "Connection",
)


def judge(program: Program, courses: list[Course]) -> str | None:
    """Return what is wrong with how a program went, if anything is.

    The ranks' steps are walked through together. While all do the same, each has its result; where
    they do not, all have one message. Whoever fails has the others aborted, which may not have come
    as far: then they have the cause in their error.
    """
    for rank, course in enumerate(courses):
        if isinstance(course.end, TimeoutError):
            return f"rank {rank} hangs in step {len(course.steps)}"
    if program.has_names:
        return _judge_by_names(program, courses)
    queues = [_meant(steps) for steps in program.ranks]
    trouble = None
    while trouble is None and all(queue and queue[0][1].kind not in _ENDS for queue in queues):
        numbers, steps = zip(*(queue.pop(0) for queue in queues), strict=True)
        outcomes = [_outcome(*each) for each in zip(courses, numbers, strict=True)]
        if len({step.compared() for step in steps}) == 1:
            trouble = _judge_results(steps, outcomes, _results(steps, numbers), courses)
        else:
            trouble = _judge_disagreement(outcomes)
            if not program.goes_on:
                break
        trouble = trouble and f"step(s) {numbers}: {trouble}"
    else:
        trouble = trouble or _judge_end(courses, queues)
    return trouble or _judge_second_threads(program, courses)


def _judge_by_names(program: Program, courses: list[Course]) -> str | None:
    """Judge a program with names: whatever the order, each rank ends, and no result is wrong."""
    if all(steps == program.ranks[0] for steps in program.ranks):
        allowed: tuple[type[BaseException] | type[None], ...] = (type(None),)
    else:
        allowed = (Raised, RanksDisagree, type(None))
    for rank, course in enumerate(courses):
        end = course.end
        is_duplicate = isinstance(end, ValueError) and "duplicate name" in str(end)
        if not (isinstance(end, allowed) or is_duplicate or _is_aborted(end)):
            return f"rank {rank} ended by {end!r}"
        if isinstance(end, RanksDisagree) and not ("rank" in str(end) and ";" in str(end)):
            return f"rank {rank}: not a message that names both sides: {end}"
    return _judge_second_threads(program, courses)


def _meant(steps: tuple[Step, ...]) -> list[tuple[int, Step]]:
    """Return the steps that a rank takes part in: not those of a second thread."""
    return [(number, step) for number, step in enumerate(steps) if not step.second_thread]


def _outcome(course: Course, number: int) -> Any:
    """Return what came of a step: what it gave, or how the rank ended in it or before."""
    return course.steps[number] if number < len(course.steps) else course.end


def _is_aborted(outcome: Any) -> bool:
    """Return whether a rank was ended by the end of another, and knows it."""
    its_own = isinstance(outcome, RanksDisagree)
    if its_own or not isinstance(outcome, CollectiveError):
        return False
    return any(cause in str(outcome) for cause in _CAUSES)


def _judge_results(
    steps: tuple[Step, ...], outcomes: list[Any], expected: list[Any], courses: list[Course]
) -> str | None:
    # Whoever raises has the others aborted. Whoever returns, early or not, costs them nothing yet.
    raises = any(isinstance(course.end, Raised | RanksDisagree) for course in courses)
    for rank, (step, outcome, right) in enumerate(zip(steps, outcomes, expected, strict=True)):
        never_waited_for = step.begun_only and outcome is None
        aborted = raises and _is_aborted(outcome)
        if outcome != right and not never_waited_for and not aborted:
            return f"rank {rank} has {outcome!r} of {step}, not {right!r}"
    return None


def _judge_disagreement(outcomes: list[Any]) -> str | None:
    messages = {str(outcome) for outcome in outcomes if isinstance(outcome, RanksDisagree)}
    others = [outcome for outcome in outcomes if not isinstance(outcome, RanksDisagree)]
    if not all(_is_aborted(outcome) for outcome in others):
        return f"ranks do not disagree: {outcomes}"
    if len(messages) > 1 or not all("rank" in each and ";" in each for each in messages):
        return f"not one message that names both sides: {messages}"
    return None


def _judge_end(courses: list[Course], queues: list[list[tuple[int, Step]]]) -> str | None:
    """Judge how each rank ended, where at least one does nothing any more by itself."""
    for rank, (course, queue) in enumerate(zip(courses, queues, strict=True)):
        last = queue[0][1].kind if queue else "return"
        allowed = {"raise": Raised, "return": type(None)}.get(last, ())
        if not isinstance(course.end, allowed) and not _is_aborted(course.end):
            return f"rank {rank} came to {last}, and ended by {course.end!r}"
    return None


def _judge_second_threads(program: Program, courses: list[Course]) -> str | None:
    for rank, (steps, course) in enumerate(zip(program.ranks, courses, strict=True)):
        for step, outcome in zip(steps, course.steps, strict=False):
            if step.second_thread and not isinstance(outcome, NotTheRank):
                return f"rank {rank}: a second thread was not refused, but got {outcome!r}"
    return None


def _results(steps: tuple[Step, ...], numbers: tuple[int, ...]) -> list[Any]:
    """Return what each rank must get of an operation that all agree on."""
    size, first = len(steps), steps[0]
    values = [_value(rank, number) for rank, number in enumerate(numbers)]
    inputs = [_tensor(step, rank, numbers[rank]) for rank, step in enumerate(steps)]
    texts = [f"{rank}/{number}" for rank, number in enumerate(numbers)]
    match first.kind:
        case "barrier":
            return [None] * size
        case "allgather_object":
            return [texts] * size
        case "broadcast_object":
            return [texts[first.root]] * size
        case "broadcast" | "broadcast_parameters":
            return [_plain(inputs[first.root])] * size
        case "allgather":
            return [_plain(torch.cat([torch.atleast_1d(each) for each in inputs]))] * size
        case "alltoall":
            return [
                _plain(torch.cat([_part(each, rank, size) for each in inputs]))
                for rank in range(size)
            ]
    total = sum(values)
    floating = inputs[0].dtype.is_floating_point
    reduced = {
        "Sum": total,
        "Average": total / size if floating else total // size,
        "Min": min(values),
        "Max": max(values),
    }[first.reduction]
    whole = torch.full(inputs[0].shape, reduced, dtype=inputs[0].dtype)
    if first.kind == "reducescatter":
        return [_plain(_part(whole, rank, size)) for rank in range(size)]
    return [[_plain(whole)] * 2 if first.kind == "grouped_allreduce" else _plain(whole)] * size


def _part(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the rows of a rank."""
    rows = len(tensor) // size
    return tensor[rank * rows : (rank + 1) * rows]
