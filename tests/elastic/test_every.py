"""What is due after some commits is done, once for each time, whatever fails meanwhile."""

from __future__ import annotations

import pytest

from nbelastic.elastic.loop import run
from nbelastic.elastic.state import ObjectState
from nbelastic.errors import CollectiveError, OptionError
from nbelastic.torch.elastic import TorchState
from tests.support.world import run_ranks

KINDS = [ObjectState, TorchState]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def state(request):
    def main(context):
        return request.param(step=0, seen=[])

    return run_ranks(1, main)[0]


def alone(function):
    return run_ranks(1, lambda context: function())[0]


def test_functions_are_called_after_every_so_many_commits(state):
    def look():
        state.seen.append(state.step)

    assert state.every(3, look) is look
    state.every(4, lambda: state.seen.append(-state.step), name="other")

    @run
    def loop(state):
        while state.step < 13:
            state.step += 1
            state.commit()

    alone(lambda: loop(state))
    assert state.seen == [3, -4, 6, -8, 9, 12, -12]


def test_one_that_failed_is_called_again_and_one_that_is_done_is_not(state):
    calls = []

    def evaluate():
        calls.append(state.step)
        if len(calls) == 2:
            raise CollectiveError("a peer is gone")
        state.seen.append(state.step)

    def train():
        state.every(2, evaluate)
        for state.step in range(1, 4):
            state.commit()
        state.step = 4
        with pytest.raises(CollectiveError):
            state.commit()
        state.restore()
        assert (state.step, state.seen) == (4, [2])
        state._run_due()
        state._run_due()
        assert (calls, state.seen) == ([2, 4, 4], [2, 4])
        state.restore()  # what came after the commit is gone, the mark too
        state._run_due()
        assert (calls, state.seen) == ([2, 4, 4, 4], [2, 4])
        state.step = 5
        state.commit()
        state.restore()
        state._run_due()
        assert len(calls) == 4

    alone(train)


def test_a_commit_within_does_not_call_it_again(state):
    state.every(1, lambda: (state.seen.append(state.step), state.commit()))
    alone(state.commit)
    assert state.seen == [0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("there", [True, False])
def test_those_who_are_behind_receive_what_is_done(kind, there):
    """Even if they have been given a new function."""

    def main(context):
        state = kind(step=0, seen=[])
        state.every(2, lambda: state.seen.append("first"), name="first")
        if there or context.rank == 1:
            state.every(3, lambda: state.seen.append("second"), name="second")
        if context.rank == 0:
            for state.step in range(1, 6):
                state.save()
                state._schedule[""] += 1
                state._run_due()
        state.sync()
        state._run_due()
        return state.seen

    expected = ["first", "second", "first"] if there else ["first", "first"]
    assert run_ranks(2, main) == [expected, expected if there else [*expected, "second"]]


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_may_have_no_schedule(kind):
    def main(context):
        state = kind(step=context.rank, seen=[])
        if context.rank == context.source:
            state.every(2, print)
        state.sync()
        return state.step

    for source in (0, 1):
        assert run_ranks(2, main, source=source) == [source] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, print), r"every\(0, …\): must be a whole number"),
        ((1.5, print), r"every\(1\.5, …\)"),
        ((True, print), r"every\(True, …\)"),
        ((5, "print"), r"every\(5, 'print'\): must be a function"),
        ((5, len), r"every\(5, len\): there is a function of that name; pass another name="),
    ],
)
def test_wrong_arguments_are_named(state, arguments, message):
    state.every(2, len)
    with pytest.raises(OptionError, match=message):
        state.every(*arguments)
    assert list(state._tasks) == ["len"]


def test_in_the_loop_it_is_too_late(state):
    state._on_commit = (print,)
    with pytest.raises(OptionError, match="call it before the elastic loop"):
        state.every(1, print)
