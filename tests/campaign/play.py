"""Playing a program on real communicators, and judging what came of it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import torch

import nbelastic.torch as hvd
from nbelastic.collectives import Communicator
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import CollectiveError, NotTheRank, RanksDisagree
from tests.collectives.worlds import MAKERS, World
from tests.support.world import StaticContext

from .programs import FIELDS, Program, Step

LIMIT_S = 30.0  # how long a program may take


class Raised(Exception):
    """What a rank raises by itself."""


@dataclass
class Course:
    """What a rank has gone through: a result or an error for each step, and how it ended."""

    steps: list[Any] = field(default_factory=list)
    end: BaseException | None = None


def play(program: Program, kind: str) -> list[Course]:
    """Run a program; a rank that does not end in time has a TimeoutError as its `end`.

    The driver's part is here, too: a rank that fails has all others aborted.
    """
    courses = [Course() for _ in program.ranks]

    def main(own: Communicator) -> None:
        try:
            with activate(StaticContext(own)):
                _run(program, own.rank, courses[own.rank].steps)
            own.close()
        except BaseException as error:
            world.abort(f"rank {own.rank} failed: {type(error).__name__}: {error}")
            raise

    with World(MAKERS[kind], len(program.ranks), timeout_s=2 * LIMIT_S) as world:
        deadline = time.monotonic() + LIMIT_S
        for rank, future in enumerate([world.start(rank, main) for rank in range(world.size)]):
            try:
                end = future.exception(max(0.0, deadline - time.monotonic()))
            except TimeoutError as hangs:
                end = hangs
            courses[rank].end = end
        return [Course(list(each.steps), each.end) for each in courses]  # as it was in time


def _run(program: Program, rank: int, done: list[Any]) -> None:
    """Go through the steps of a rank, in its thread."""
    # Operations belong to this thread from the start, whatever a second one calls first.
    hvd.barrier()
    begun: list[tuple[int, Any]] = []
    for number, step in enumerate(program.ranks[rank]):
        if step.kind == "return":
            break
        if step.kind == "raise":
            raise Raised(f"by itself in step {number}")
        result = None
        try:
            if step.second_thread:
                with ThreadPoolExecutor(1) as second:
                    call = second.submit(copy_context().run, _call, step, rank, number)
                    result = call.exception() or call.result()
            elif step.begun_only:
                begun.append((number, _call(step, rank, number)))
            else:
                result = _plain(_call(step, rank, number))
        except RanksDisagree as error:
            if not program.goes_on:
                raise
            result = error
        done.append(result)
    for number, handle in begun:
        done[number] = _plain(handle.wait())


def _tensor(step: Step, rank: int, number: int) -> torch.Tensor:
    return torch.full(step.shape, rank + number + 1, dtype=getattr(torch, step.dtype))


def _call(step: Step, rank: int, number: int) -> Any:
    """Do an operation and return its result, or its handle."""
    tensor, fields = _tensor(step, rank, number), FIELDS[step.kind]
    first = {
        "grouped_allreduce": [tensor, tensor],
        "broadcast_object": f"{rank}/{number}",
        "allgather_object": f"{rank}/{number}",
        "broadcast_parameters": {"weight": tensor},
    }.get(step.kind, tensor)
    given = {"op": getattr(hvd, step.reduction), "root_rank": step.root, "name": step.name}
    taken = {"op": "reduction", "root_rank": "root"}
    options = {key: each for key, each in given.items() if taken.get(key, key) in fields}
    function = getattr(hvd, f"{step.kind}_async" if step.begun_only else step.kind)
    result = function(*() if step.kind == "barrier" else (first,), **options)
    return tensor if step.kind == "broadcast_parameters" else result


def _plain(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.unique().tolist(), result.numel(), str(result.dtype)
    return [_plain(each) for each in result] if isinstance(result, list) else result


# -- what must have come of it ---------------------------------------------------------------------

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
    as far: then they have the cause in their error. With names the order is free, so that the walk
    is left out: each rank ends by itself, by a disagreement, or by another's end.
    """
    for rank, (steps, course) in enumerate(zip(program.ranks, courses, strict=True)):
        if isinstance(course.end, TimeoutError):
            return f"rank {rank} hangs in step {len(course.steps)}"
        for step, outcome in zip(steps, course.steps, strict=False):
            if step.second_thread and not isinstance(outcome, NotTheRank):
                return f"rank {rank}: a second thread was not refused, but got {outcome!r}"
    if program.has_names:
        return _judge_by_names(program, courses)
    # Of the steps that a rank takes part in: not those of a second thread.
    queues = [[e for e in enumerate(ss) if not e[1].second_thread] for ss in program.ranks]
    while all(queue and queue[0][1].kind not in ("raise", "return") for queue in queues):
        numbers, steps = zip(*(queue.pop(0) for queue in queues), strict=True)
        outcomes = [  # of a rank that has not come as far, its end
            course.steps[number] if number < len(course.steps) else course.end
            for course, number in zip(courses, numbers, strict=True)
        ]
        agree = len({step.compared() for step in steps}) == 1
        if agree:
            trouble = _judge_results(steps, outcomes, _results(steps, numbers), courses)
        else:
            trouble = _judge_disagreement(outcomes)
        if trouble or not (agree or program.goes_on):
            return trouble and f"step(s) {numbers}: {trouble}"
    for rank, (course, queue) in enumerate(zip(courses, queues, strict=True)):
        last = queue[0][1].kind if queue else "return"
        allowed = {"raise": Raised, "return": type(None)}.get(last, ())
        if not isinstance(course.end, allowed) and not _is_aborted(course.end):
            return f"rank {rank} came to {last}, and ended by {course.end!r}"
    return None


def _judge_by_names(program: Program, courses: list[Course]) -> str | None:
    is_same = all(steps == program.ranks[0] for steps in program.ranks)
    allowed = type(None) if is_same else Raised | RanksDisagree | None
    for rank, course in enumerate(courses):
        end = course.end
        is_duplicate = isinstance(end, ValueError) and "duplicate name" in str(end)
        if not (isinstance(end, allowed) or is_duplicate or _is_aborted(end)):
            return f"rank {rank} ended by {end!r}"
        if isinstance(end, RanksDisagree) and not _names_both(end):
            return f"rank {rank}: not a message that names both sides: {end}"
    return None


def _names_both(error: RanksDisagree) -> bool:
    return "rank" in str(error) and ";" in str(error)


def _is_aborted(outcome: Any) -> bool:
    """Return whether a rank was ended by the end of another, and knows it."""
    if isinstance(outcome, RanksDisagree) or not isinstance(outcome, CollectiveError):
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
    found = [outcome for outcome in outcomes if isinstance(outcome, RanksDisagree)]
    if not all(_is_aborted(outcome) for outcome in outcomes if outcome not in found):
        return f"ranks do not disagree: {outcomes}"
    if len(set(map(str, found))) > 1 or not all(map(_names_both, found)):
        return f"not one message that names both sides: {found}"
    return None


def _results(steps: tuple[Step, ...], numbers: tuple[int, ...]) -> list[Any]:
    """Return what each rank must get of an operation that all agree on."""
    size, first = len(steps), steps[0]
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
            parts = [each.chunk(size) if len(each) else [each] * size for each in inputs]
            return [_plain(torch.cat(mine)) for mine in zip(*parts, strict=True)]
    stacked = torch.stack(inputs).double()
    reductions = {"Sum": torch.sum, "Average": torch.mean, "Min": torch.amin, "Max": torch.amax}
    whole = reductions[first.reduction](stacked, 0).to(inputs[0].dtype)  # whole numbers cut off
    if first.kind == "reducescatter":
        return [_plain(whole[: len(whole) // size])] * size  # all its rows are alike
    return [[_plain(whole)] * 2 if first.kind == "grouped_allreduce" else _plain(whole)] * size
