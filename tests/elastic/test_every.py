"""What is due after some commits is done, once for each time, whatever fails meanwhile."""

import functools

import pytest

from nbelastic.elastic.checkpoint.files import CheckpointSpec
from nbelastic.elastic.loop import run
from nbelastic.elastic.state import ObjectState
from nbelastic.errors import CollectiveError, OptionError
from nbelastic.torch.elastic import TorchState
from tests.elastic.members import one_rank
from tests.support.world import run_ranks

KINDS = [ObjectState, TorchState]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def state(request):
    return alone(lambda: request.param(step=0, seen=[]))


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


def test_one_that_was_added_since_the_checkpoint_is_called_when_it_is_due(tmp_path):
    """And the checkpoint of a function that has it can be resumed without."""

    @run
    def train(state, steps):
        while state.step < steps:
            state.step += 1
            state.commit()

    for number, expected in enumerate([[], [5], [5]]):
        state = TorchState(step=0, seen=[])
        if number == 1:
            state.every(2, lambda state=state: state.seen.append(state.step))
        spec = CheckpointSpec(url=str(tmp_path), run="abc"[number], every=100, resume=True)
        one_rank(functools.partial(train, state, 3 + 3 * number), checkpoint=spec)
        assert state.seen == expected


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


def test_the_loop_calls_one_that_failed_again_before_the_next_step():
    state, calls = TorchState(step=0), []

    def evaluate():
        calls.append(state.step)
        if len(calls) == 1:
            raise CollectiveError("a peer is gone")

    @run
    def train(state):
        for state.step in range(state.step + 1, 4):
            state.commit()

    state.every(2, evaluate)
    one_rank(functools.partial(train, state))
    assert calls == [2, 2]


def test_a_commit_within_does_not_call_it_again_and_in_the_loop_it_is_too_late_to_add_one(state):
    state.every(1, lambda: (state.seen.append(state.step), state.commit()))
    alone(state.commit)
    assert state.seen == [0]
    state._on_commit = (print,)
    with pytest.raises(OptionError, match="call it before the elastic loop"):
        state.every(1, print)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("theirs", "mine", "later"),  # functions of the source and of the other, and due on the other
    [
        ({"first": 2}, {"first": 2, "second": 3}, ["second"]),
        ({"first": 2, "second": 3}, {}, []),
        ({}, {"first": 2}, []),
    ],
)
def test_those_who_are_behind_receive_what_is_done(kind, theirs, mine, later):
    """Even if they have been given a new function, or none."""

    def main(context):
        state = kind(step=0, seen=[])
        for name, commits in (theirs if context.rank == 1 else mine).items():
            state.every(commits, lambda name=name: state.seen.append(name), name=name)
        if context.rank == 1:
            for state.step in range(1, 6):
                state.commit()
        state.sync()
        state._run_due()
        return state.step, state.seen

    done = [name for step in range(1, 6) for name, every in theirs.items() if step % every == 0]
    assert run_ranks(2, main, source=1) == [(5, done + later), (5, done)]


def test_wrong_arguments_are_named(state):
    state.every(2, len)
    for arguments, message in (
        ((0, print), r"every\(0, …\): must be a whole number"),
        ((1.5, print), r"every\(1\.5, …\)"),
        ((True, print), r"every\(True, …\)"),
        ((5, "print"), r"every\(5, 'print'\): must be a function"),
        ((5, len), r"every\(5, len\): there is a function of that name; pass another name="),
    ):
        with pytest.raises(OptionError, match=message):
            state.every(*arguments)
    assert list(state._tasks) == ["len"]
