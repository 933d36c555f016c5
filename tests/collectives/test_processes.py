"""Ranks in processes of their own, which are killed and stopped."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from concurrent.futures import Future

import pytest

from nbelastic.collectives import RendezvousServer
from tests.collectives.fork_server import ForkServer
from tests.collectives.worlds import BIND, KINDS, PATIENCE_S, TIMEOUT_S, eventually, needs_core

_numbers = itertools.count()
_generations = itertools.count(1)


class Process:
    """A process that serves as a rank; see ``member.py``."""

    def __init__(self, fork_server):
        self._fork_server = fork_server
        its_input, stdin = os.pipe()
        stdout, its_output = os.pipe()
        self._number = fork_server.start(its_input, its_output)
        for end in (its_input, its_output):
            os.close(end)
        self._stdin, self._stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)
        self._answers = {}
        self._reader = threading.Thread(target=self._read, name="reader")
        self._reader.start()

    def ask(self, verb, **arguments):
        """Send a request and return a future of the answer."""
        number, future = next(_numbers), Future()
        self._answers[number] = future
        self._stdin.write(json.dumps([number, verb, arguments]) + "\n")
        self._stdin.flush()
        return future

    def _read(self):
        for line in self._stdout:
            number, how, value = json.loads(line)
            self._answers.pop(number).set_result((how, value))

    def send_signal(self, number):
        os.kill(self._number, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)
        self._part()

    def hang_up(self):
        """Have the process end by itself."""
        self._stdin.close()

    def leave(self):
        """Wait until it has, and return its exit code."""
        self.hang_up()
        return self._part()

    def _part(self):
        code = self._fork_server.wait(self._number)
        self._reader.join(PATIENCE_S)
        for pipe in (self._stdin, self._stdout):
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # what it was last told was never read
        return code


class Crew:
    """Processes, with a store, in generations of which all that live are members."""

    def __init__(self, kind, size, fork_server):
        self.kind = kind
        self.store = RendezvousServer(BIND)
        self.members = [Process(fork_server) for _ in range(size)]

    def form(self):
        """Connect all members and check that they can work together."""
        generation, answers = self.connect()
        for answer in answers:
            assert ok(answer) is None
        total = sum(range(1, len(self.members) + 1))
        assert [ok(answer) for answer in self.ask("allreduce", length=10)] == [total] * len(answers)
        return generation

    def connect(self):
        """Have all members make their communicators and begin to connect."""
        generation = next(_generations)
        made = [
            member.ask(
                "make",
                kind=self.kind,
                store=self.store.address,
                job="crew",
                generation=generation,
                rank=rank,
                size=len(self.members),
                bind=BIND,
                timeout_s=TIMEOUT_S,
            )
            for rank, member in enumerate(self.members)
        ]
        for answer in made:
            ok(answer)
        return generation, self.ask("connect")

    def ask(self, verb, **arguments):
        return [member.ask(verb, **arguments) for member in self.members]

    def dismiss(self, member):
        """Kill a member."""
        self.members.remove(member)
        member.kill()

    def wait_until_waiting(self):
        for member in self.members:
            eventually(lambda member=member: ok(member.ask("waiting")), "waiting")

    def close(self):
        for member in list(self.members):
            self.dismiss(member)
        self.store.close()


def ok(answer):
    how, value = answer.result(PATIENCE_S)
    assert how == "ok", value
    return value


def error(answer):
    how, value = answer.result(PATIENCE_S)
    assert how == "error", value
    assert value.startswith("CollectiveError: ")
    return value.removeprefix("CollectiveError: ")


@pytest.fixture(scope="module")
def fork_server():
    fork_server = ForkServer()
    yield fork_server
    fork_server.close()


# What devices add is tested with a rank that dies at any of its steps: see test_cuda_ipc.
OVER_THE_HOST = [kind for kind in KINDS if kind.values[0] in ("gloo", "shm", "hierarchical")]


@pytest.fixture(
    params=[kind for kind in KINDS if kind.values[0] not in ("cuda_ipc", "cuda_ipc+gloo")],
    scope="module",
)
def crew(request, fork_server):
    """Four processes; the tests of this module, in their order, use them up."""
    crew = Crew(request.param, 4, fork_server)
    yield crew
    crew.close()


def test_a_killed_rank_is_noticed_and_the_rest_form_anew(crew):
    crew.form()
    victim = crew.members[2]
    survivors = [member for member in crew.members if member is not victim]
    neighbours = [crew.members[1], crew.members[3]]  # rank 0 is none: its connection is whole
    answers = {member: member.ask("allreduce", length=100_000) for member in survivors}
    for member in survivors:
        eventually(lambda member=member: ok(member.ask("waiting")), "waiting")
    crew.dismiss(victim)
    for member in neighbours:
        error(answers[member])  # by themselves
    for member in survivors:
        ok(member.ask("abort", reason="a rank is gone"))
        error(answers[member])
    crew.form()


def test_a_stopped_rank_holds_up_nobody_after_an_abort(crew):
    generation = crew.form()
    victim = crew.members[1]
    victim.send_signal(signal.SIGSTOP)
    crew.members.remove(victim)
    try:
        answers = crew.ask("allreduce", length=3_000_000)
        crew.wait_until_waiting()
        for answer in crew.ask("abort", reason="a rank is stopped"):
            ok(answer)
        for answer in answers:
            assert error(answer).endswith("a rank is stopped")  # maybe another's abort
        crew.form()  # while the old generation is dying, and one of its ranks is not
        for member in crew.members:  # what was stuck ends long before its timeout
            eventually(lambda member=member: not_left(member, generation), "the end of the old")
    finally:
        victim.send_signal(signal.SIGCONT)
        victim.kill()


def not_left(member, generation):
    return not any(f"-{generation}-" in name for name in ok(member.ask("threads")))


def test_processes_end_cleanly_whatever_is_under_way(crew):
    crew.form()
    waiting, idle = crew.members
    waiting.ask("allreduce", length=100)
    eventually(lambda: ok(waiting.ask("waiting")), "waiting")
    crew.members.clear()
    waiting.hang_up()
    idle.hang_up()
    assert waiting.leave() == 0
    assert idle.leave() == 0


@pytest.mark.parametrize("kind", OVER_THE_HOST)
def test_ranks_killed_in_sums_along_a_tree_leave_nothing_for_the_next(fork_server, kind):
    """Before its first message, or in the middle: the next generation adds what is its own."""
    crew = Crew(kind, 4, fork_server)
    try:
        for takes_part in (False, True):
            crew.form()
            victim = crew.members[1]
            survivors = [member for member in crew.members if member is not victim]
            answers = [each.ask("sum_along_tree", length=3_000_000, leaves=9) for each in survivors]
            for member in survivors:
                eventually(lambda member=member: ok(member.ask("waiting")), "waiting")
            if takes_part:
                victim.ask("sum_along_tree", length=3_000_000, leaves=9)
            crew.dismiss(victim)
            for member in survivors:
                ok(member.ask("abort", reason="a rank is gone"))
            outcomes = [answer.result(PATIENCE_S) for answer in answers]
            assert all(how == "error" or (takes_part and value == 36.0) for how, value in outcomes)
            crew.form()
            sums = crew.ask("sum_along_tree", length=70_001, leaves=5)
            assert [ok(answer) for answer in sums] == [10.0] * len(survivors)
    finally:
        crew.close()


@needs_core
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", ["shm", "hierarchical"])
def test_a_rank_killed_while_a_segment_forms_blocks_no_other(fork_server, kind, victim):
    crew = Crew(kind, 4, fork_server)
    try:
        dying = crew.members[victim]
        ok(dying.ask("die_when_forming"))
        _, answers = crew.connect()
        crew.dismiss(dying)
        for member in crew.members:
            ok(member.ask("abort", reason="a rank is gone"))
        for rank, answer in enumerate(answers):
            if rank != victim:
                error(answer)
        crew.form()
    finally:
        crew.close()
