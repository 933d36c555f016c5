"""Ranks in processes of their own, which are killed and stopped."""

import os
import signal
from functools import partial

import pytest

from nbelastic.collectives.shm import segment
from tests.collectives.crew import Crew, allreduce, is_waiting, threads, until
from tests.collectives.worlds import KINDS, PATIENCE_S, failure, needs_core


def die_when_forming(_here):
    """Be killed, in time to come, in the middle of forming a segment."""
    segment.join_segment = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


# What devices add is tested with a rank that dies at any of its steps: see test_cuda_ipc.
@pytest.fixture(params=[kind for kind in KINDS if kind.values[0] != "cuda_ipc"], scope="module")
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
