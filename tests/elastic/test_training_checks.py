"""Loops that do not commit are warned of, and parameters are sampled at the same moments."""

import math
from types import SimpleNamespace

import pytest
import torch

from nbelastic.elastic import ObjectState, run, training_checks
from nbelastic.elastic.checkpoint.files import CheckpointSpec
from nbelastic.elastic.ranks.context import Context, current
from nbelastic.elastic.ranks.runtime import RankSpec
from nbelastic.elastic.ranks.session import Session
from nbelastic.elastic.state import State
from nbelastic.elastic.training_checks import (
    NO_COMMIT,
    TrainingChecks,
    note_step,
    watch,
)
from nbelastic.messages import AnyEvent, Place, RankNote, RankReady, WeightsSampled, decode, encode
from tests.elastic.members import one_rank


class Notes(list):
    report = list.append

    def warnings(self):
        return [note.detail for note in self if isinstance(note, RankNote)]


class Sampled(State):
    """A state of which only its sample is known."""

    def __init__(self, *values):
        self.values = values

    def _sample(self):
        return self.values, ("SGD",)


@pytest.fixture
def session():
    made = Session(RankSpec(job="job", start=3, place=Place(0, 2, 0, 2, 0, 1), bind="::1"), Notes())
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


def optimizer_of(value, kind=torch.nn.Parameter):
    return torch.optim.SGD([kind(torch.full((1,), value)).requires_grad_()], lr=0.1)


def train(session, steps, commit_every=0, state=None, *, begins="", optimizers=lambda _: ()):
    """Train in a loop; return what was sampled besides the state."""
    watched = TrainingChecks(session, state or Sampled(1.0, 2.0))
    session.version = 7 if begins == "joins" else 0
    watched.begun(resumed=begins == "resumes")
    for step in range(1, steps + 1):
        session.about_to_exchange()
        for each in optimizers(step):
            note_step(session, each)
        if commit_every and step % commit_every == 0:
            watched.committed()
    watched.ended()
    watched.close()
    return [n for n in session.port if isinstance(n, WeightsSampled) and n.besides]


@pytest.mark.parametrize(
    ("steps", "commit_every", "begins", "warnings"),
    [
        (100, 0, "", [NO_COMMIT]),
        (101, 0, "", [NO_COMMIT]),
        (500, 200, "", [NO_COMMIT]),
        (500, 100, "", []),
        (0, 0, "", [NO_COMMIT]),
        (0, 0, "resumes", []),  # the loop of the checkpoint may have ended
        (101, 0, "resumes", [NO_COMMIT]),
        (0, 0, "joins", []),  # others have committed
    ],
)
def test_loops_without_a_commit_are_warned_of_once(session, steps, commit_every, begins, warnings):
    train(session, steps, commit_every, begins=begins)
    assert session.port.warnings() == warnings


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
    assert session.port.warnings() == [NO_COMMIT]


def test_parameters_are_sampled_early_later_and_at_the_end_of_each_generation(session):
    watched = TrainingChecks(session, Sampled(1.0, 2.0))
    for session.generation in (5, 6):
        watched.begun()
        for _ in range(150):
            watched.committed()
    watched.ended()
    assert session.port[0] == WeightsSampled(3, 5, 1, (1.0, 2.0), ("SGD",))
    sampled = [(note.generation, note.moment) for note in session.port]
    assert sampled == [(5, 1), (5, 10), (5, 100), (6, 1), (6, 10), (6, 100), (6, 0)]


def test_what_is_no_finite_number_can_be_sent_and_compared(session):
    train(session, 1, 1, Sampled(1.0, math.nan, -math.inf))
    assert session.port[0].values == (1.0, training_checks.NOT_FINITE, training_checks.NOT_FINITE)
    assert decode(encode(session.port[0]), AnyEvent) == session.port[0]


def test_a_rank_alone_and_a_state_without_parameters_are_not_sampled(session):
    class Odd(Sampled):
        def _sample(self):
            raise RuntimeError("no values here")

    train(session, 3, 1, Sampled())
    train(session, 3, 1, Odd())
    session.size = 1
    train(session, 3, 1)
    assert session.port == []


def test_where_the_state_has_no_parameters_those_of_stepped_optimizers_are_sampled(session):
    note_step(session, optimizer_of(3.0))
    train(session, 1, 1, Sampled())
    assert [(note.values, note.plain) for note in session.port] == [((3.0,), ("SGD",))] * 2


# -- optimizers that the state does not have -------------------------------------------------------


def test_what_is_trained_besides_the_state_is_sampled_once_it_is_regular(session):
    critic = optimizer_of(3.0)
    found = train(session, 150, 1, optimizers=lambda _: [critic])
    assert [note.moment for note in found] == [10, 100, 0]
    assert {(note.values, note.plain) for note in found} == {((3.0,), ("SGD",))}


RARE, ADVERSARIAL, WRAPPED = optimizer_of(1.0), optimizer_of(1.0, torch.Tensor), optimizer_of(1.0)
WRAPPED._reducer = None


@pytest.mark.parametrize(
    "optimizers",
    [
        lambda _: [optimizer_of(1.0)] * 5,  # of a task's own, as in meta-learning
        lambda step: [RARE] if step % 4 == 0 else [],
        lambda _: [ADVERSARIAL],  # it changes an example, not a model
        lambda _: [WRAPPED],
    ],
    ids=["short-lived", "rare", "no-parameters", "wrapped"],
)
def test_what_a_rank_may_train_alone_is_not_compared(session, optimizers):
    assert train(session, 150, 1, optimizers=optimizers) == []


def test_steps_before_a_generation_do_not_count_in_it(session):
    first, other = optimizer_of(3.0), optimizer_of(4.0)
    for _ in range(200):
        note_step(session, first)
    found = train(session, 12, 1, optimizers=lambda _: [other, first])
    assert {note.values for note in found} == {(4.0, 3.0)}, "as on a rank that has just joined"


def test_what_is_trained_besides_a_broadcast_is_sampled_at_the_end(session):
    watch(session, lambda: (1.0,))
    other = optimizer_of(5.0)
    for _ in range(20):
        note_step(session, other)
    session.parameters.returned()
    found = [(note.moment, note.besides, note.values) for note in session.port]
    assert found == [(0, False, (1.0,)), (0, True, (5.0,))]
    session.parameters.close()


# -- without an elastic loop -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loops", "moments"),
    [(0, [-4, -13, -54, -63, -153, 0]), (1, [])],  # a loop samples by itself
)
def test_without_a_loop_operations_are_counted_and_the_end_is_sampled(session, loops, moments):
    session.loops = loops
    for number in range(253):
        if number in (3, 53):  # the second in the place of the first
            watch(session, lambda: (1.0,))
        session.about_to_exchange()
    session.parameters.returned()
    assert [note.moment for note in session.port] == moments
    session.parameters.close()


def test_outside_a_job_nothing_is_watched():
    context = Context()
    watch(context, lambda: (1.0,))
    assert (context.parameters, context.before_exchange) == (None, ())


# -- what is wrong with a state --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "said"),
    [
        ([2, 2, 3], []),
        ([2, 3, 0, 1], []),  # a second phase begins
        ([2, 0, 1], [(2, 0)]),
        ([None, 0], []),
    ],
)
def test_a_loop_that_begins_with_the_first_epoch_again_is_warned_of(session, epochs, said):
    state = Sampled()
    state.epoch = epochs[0]
    watched = TrainingChecks(session, state)
    watched.begun()
    for state.epoch in epochs[1:]:
        watched.committed()
    watched.close()
    words = training_checks.EPOCH_WENT_BACK
    assert session.port.warnings() == [words.format(before=old, now=new) for old, new in said]
