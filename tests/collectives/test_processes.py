"""Ranks in processes of their own, which are killed and stopped."""

import os
import signal
from functools import partial

import pytest
import torch

from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.collectives.shm import handshake
from tests.collectives.crew import Crew, allreduce, is_waiting, threads, until
from tests.collectives.worlds import KINDS, PATIENCE_S, failure, needs_core

# What devices add is tested with a rank that dies at any of its steps: see test_cuda_ipc.
OVER_THE_HOST = [kind for kind in KINDS if kind.values[0] in ("gloo", "shm", "hierarchical")]


def sum_along_tree(here, length, leaves):
    """Return the sum of the leaves' numbers, of which this rank has those of its block."""
    blocks = Blocks.even(leaves, here.communicator.size)
    nodes = [
        [torch.full((length,), float(sum(range(*node))))]
        for node in blocks.covers[here.communicator.rank]
    ]
    output = torch.full((length,), -1.0)
    here.communicator.allreduce_tree(nodes, blocks, [output])
    assert (output == output[0]).all()
    return output[0].item()


def die_when_forming(_here):
    """Be killed, in time to come, in the middle of forming a segment."""
    for name in ("create", "join"):
        setattr(handshake.SegmentSocket, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


@pytest.fixture(
    params=[kind for kind in KINDS if kind.values[0] not in ("cuda_ipc", "cuda_ipc+gloo")],
    scope="module",
)
def crew(request):
    """Four processes; the tests of this module, in their order, use them up."""
    with Crew(request.param, 4) as crew:
        yield crew


def test_a_killed_rank_is_noticed_and_the_rest_form_anew(crew):
    crew.form()
    _, first, victim, last = crew.members
    survivors = [member for member in crew.members if member is not victim]
    answers = {member: member.ask(partial(allreduce, length=100_000)) for member in survivors}
    for member in survivors:
        until(member, is_waiting, "waiting")
    crew.dismiss(victim)
    for neighbour in (first, last):  # rank 0 is none: its connection is whole
        failure(answers[neighbour])  # by themselves
    crew.abort("a rank is gone")
    for answer in answers.values():
        failure(answer)
    crew.form()


def test_a_stopped_rank_holds_up_nobody_after_an_abort(crew):
    generation = crew.form()
    victim = crew.members.pop(1)
    victim.send_signal(signal.SIGSTOP)
    try:
        answers = crew.ask(partial(allreduce, length=3_000_000))
        for member in crew.members:
            until(member, is_waiting, "waiting")
        crew.abort("a rank is stopped")
        for answer in answers:
            assert failure(answer).endswith("a rank is stopped")  # maybe another's abort
        crew.form()  # while the old generation is dying, and one of its ranks is not
        old = f"-{generation}-"
        for member in crew.members:  # what was stuck ends long before its timeout
            until(member, lambda here: old not in "".join(threads(here)), "the end of the old")
    finally:
        victim.send_signal(signal.SIGCONT)
        victim.kill()


def test_processes_end_cleanly_whatever_is_under_way(crew):
    crew.form()
    waiting, idle = crew.members
    waiting.ask(allreduce)
    until(waiting, is_waiting, "waiting")
    crew.members.clear()
    waiting.hang_up()
    idle.hang_up()
    assert waiting.leave() == 0
    assert idle.leave() == 0


@pytest.mark.parametrize("kind", OVER_THE_HOST)
def test_ranks_killed_in_sums_along_a_tree_leave_nothing_for_the_next(kind):
    """Before its first message, or in the middle: the next generation adds what is its own."""
    large = partial(sum_along_tree, length=3_000_000, leaves=9)
    with Crew(kind, 4) as crew:
        for takes_part in (False, True):
            crew.form()
            victim = crew.members[1]
            survivors = [member for member in crew.members if member is not victim]
            answers = [member.ask(large) for member in survivors]
            for member in survivors:
                until(member, is_waiting, "waiting")
            if takes_part:
                victim.ask(large)
            crew.dismiss(victim)
            crew.abort("a rank is gone")
            for answer in answers:
                if answer.exception(PATIENCE_S) is None:
                    assert takes_part
                    assert answer.result() == 36.0
            crew.form()
            sums = crew.ask(partial(sum_along_tree, length=70_001, leaves=5))
            assert [answer.result(PATIENCE_S) for answer in sums] == [10.0] * len(survivors)


@needs_core
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", ["shm", "hierarchical"])
def test_a_rank_killed_while_a_segment_forms_blocks_no_other(kind, victim):
    with Crew(kind, 4) as crew:
        dying = crew.members[victim]
        dying.ask(die_when_forming, at_once=True).result(PATIENCE_S)
        _, answers = crew.connect()
        crew.dismiss(dying)
        crew.abort("a rank is gone")
        answers.pop(victim)
        for answer in answers:
            failure(answer)
        crew.form()
