"""Loops that do not commit are warned of, and parameters are sampled at the same moments."""

import math
from types import SimpleNamespace

import pytest
import torch

from nbelastic.elastic import ObjectState, run, training_checks
from nbelastic.elastic.checkpoint.files import CheckpointSpec
from nbelastic.elastic.ranks.context import current
from nbelastic.elastic.ranks.runtime import RankSpec
from nbelastic.elastic.ranks.session import Session
from nbelastic.elastic.state import State
from nbelastic.elastic.training_checks import (
    NO_COMMIT,
    TrainingChecks,
    note_step,
    watch,
)
from nbelastic.messages import (
    FRESH,
    AnyEvent,
    Place,
    RankNote,
    RankReady,
    WeightsSampled,
    decode,
    encode,
)
from tests.elastic.members import one_rank


class Notes(list):
    def warnings(self):
        return [note.detail for note in self if isinstance(note, RankNote)]


class Sampled(State):
    """A state of which only its sample is known."""

    def __init__(self, *values):
        self.values = values

    def _sample(self):
        return self.values


@pytest.fixture
def session():
    told = Notes()
    spec = RankSpec(job="job", start=3, place=Place(0, 2, 0, 2, 0, 1), bind="::1")
    made = Session(spec, told.append)
    made.told = told
    made.generation = 5
    yield made
    assert made.before_exchange == ()
    made.close()


@pytest.mark.parametrize(("ahead", "version"), [(False, 7), (True, 7.5)])
def test_a_rank_whose_state_is_newer_than_its_commit_says_so(ahead, version):
    def rank():
        current().version, current().ahead = 7, ahead
        current().form(1)

    assert [each.version for each in one_rank(rank) if isinstance(each, RankReady)] == [version]


def train(session, steps, commit_every=0, state=None, *, joins=False):
    """Train in a loop."""
    watched = TrainingChecks(session)
    session.version = FRESH
    watched.enter(state or Sampled(1.0, 2.0))
    session.version = 7 if joins else 0
    watched.begun()
    for step in range(1, steps + 1):
        session.about_to_exchange()
        if commit_every and step % commit_every == 0:
            watched.committed()
    watched.ended()
    watched.leave()


@pytest.mark.parametrize(
    ("steps", "commit_every", "joins", "warnings"),
    [
        (100, 0, False, [NO_COMMIT]),
        (101, 0, False, [NO_COMMIT]),
        (500, 200, False, [NO_COMMIT]),
        (500, 100, False, []),
        (0, 0, False, [NO_COMMIT]),
        (101, 0, True, []),  # others have committed
    ],
)
def test_loops_without_a_commit_are_warned_of_once(session, steps, commit_every, joins, warnings):
    train(session, steps, commit_every, joins=joins)
    assert session.told.warnings() == warnings


def test_a_later_loop_that_had_ended_in_its_checkpoint_need_not_commit(tmp_path):
    @run
    def train(state):
        while state.step < 3:
            state.step += 1
            state.commit()

    def two_loops():
        for step in (0, 1):
            train(ObjectState(step=step))

    for resume in (False, True):
        spec = CheckpointSpec(url=str(tmp_path), run="ab"[resume], every=1, resume=resume)
        notes = [each for each in one_rank(two_loops, checkpoint=spec) if type(each) is RankNote]
        assert [each for each in notes if each.about == "warning"] == []
    assert sum("goes on from" in each.detail for each in notes) == 2, "each loop from its own"


def test_few_steps_that_take_long_are_enough(session, monkeypatch):
    times = iter([0.0, 30.0, 61.0])
    monkeypatch.setattr(training_checks, "time", SimpleNamespace(monotonic=lambda: next(times)))
    train(session, 2)
    assert session.told.warnings() == [NO_COMMIT]


def test_parameters_are_sampled_early_later_and_at_the_end_of_each_generation(session):
    watched = TrainingChecks(session)
    watched.enter(Sampled(1.0, 2.0))
    for session.generation in (5, 6):
        watched.begun()
        for _ in range(150):
            watched.committed()
    watched.ended()
    assert session.told[0] == WeightsSampled(3, 5, 1, (1.0, 2.0))
    sampled = [(note.generation, note.moment) for note in session.told]
    assert sampled == [(5, 1), (5, 10), (5, 100), (6, 1), (6, 10), (6, 100), (6, 0)]


def test_what_is_no_finite_number_can_be_sent_and_compared(session):
    train(session, 1, 1, Sampled(1.0, math.nan, -math.inf))
    assert session.told[0].values == (1.0, training_checks.NOT_FINITE, training_checks.NOT_FINITE)
    assert decode(encode(session.told[0]), AnyEvent) == session.told[0]


def test_a_rank_alone_and_a_state_without_parameters_are_not_sampled(session):
    class Odd(Sampled):
        def _sample(self):
            raise RuntimeError("no values here")

    train(session, 3, 1, Sampled())
    train(session, 3, 1, Odd())
    session.size = 1
    train(session, 3, 1)
    assert session.told == []


def test_where_the_state_has_no_parameters_those_of_stepped_optimizers_are_sampled(session):
    """They are those of the generation, in one order: newcomers have no others."""
    models = [torch.nn.Parameter(torch.tensor([value])) for value in (1.0, 2.0, 3.0)]
    first, *others = (torch.optim.SGD([each]) for each in models)
    watched = session.kept(TrainingChecks)
    watched.enter(Sampled())
    note_step(session, first)
    for session.generation, order in ((6, others), (7, others[::-1])):
        watched.begun()
        for each in (*order, *others):
            note_step(session, each)
        watched.committed()
    watched.leave()
    assert [note.values for note in session.told] == [(2.0, 3.0)] * 2


# -- without an elastic loop -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loops", "moments"),
    [(0, [-4, -13, -54, -63, -153, 0]), (1, [])],  # a loop samples by itself
)
def test_without_a_loop_operations_are_counted_and_the_end_is_sampled(session, loops, moments):
    session.loops = loops
    for number in range(253):
        if number in (3, 53):  # the second in the place of the first
            watch(session, [("weight", torch.ones(1)), ("running_mean", torch.zeros(1))])
        session.about_to_exchange()
    session.kept(TrainingChecks).returned()
    assert [(note.moment, note.values) for note in session.told] == [(n, (1.0,)) for n in moments]
    session.kept(TrainingChecks).leave()
