"""Loops that do not commit are warned of, and parameters are sampled at the same moments."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from nbelastic.elastic import supervision
from nbelastic.elastic.context import LocalContext
from nbelastic.elastic.runtime import RankSpec
from nbelastic.elastic.session import Session
from nbelastic.elastic.supervision import NEVER_COMMITTED, NO_COMMIT, Supervision, watch
from nbelastic.membership import Place, RankNote, WeightsSampled, pack_event, unpack_event


class Notes(list):
    report = list.append

    def warnings(self):
        return [note.detail for note in self if isinstance(note, RankNote)]

    def moments(self):
        return [note.moment for note in self if isinstance(note, WeightsSampled)]


class Sampled:
    """A state of which only its sample is known."""

    values = (1.0, 2.0)

    def _sample(self):
        return self.values, ("SGD",)


@pytest.fixture
def session():
    made = Session(RankSpec(job="job", start=3, place=Place(0, 2, 0, 2, 0, 1), bind="::1"), Notes())
    made.generation = 5
    yield made
    assert made.before_exchange == ()
    made.close()


def train(session, steps, commit_every=0, state=None):
    watched = Supervision(session, state or Sampled())
    watched.begun()
    for step in range(1, steps + 1):
        session.about_to_exchange()
        if commit_every and step % commit_every == 0:
            watched.committed()
    watched.ended()
    watched.close()


@pytest.mark.parametrize(
    ("steps", "commit_every", "warnings"),
    [
        (3, 0, [NEVER_COMMITTED]),
        (100, 0, [NEVER_COMMITTED]),
        (101, 0, [NO_COMMIT]),
        (500, 0, [NO_COMMIT]),
        (500, 200, [NO_COMMIT]),
        (500, 100, []),
        (3, 3, []),
        (0, 0, [NEVER_COMMITTED]),
    ],
)
def test_loops_without_a_commit_are_warned_of_once(session, steps, commit_every, warnings):
    train(session, steps, commit_every)
    assert session.port.warnings() == warnings


def test_few_steps_that_take_long_are_enough(session, monkeypatch):
    times = iter([0.0, 30.0, 61.0])
    monkeypatch.setattr(supervision, "time", SimpleNamespace(monotonic=lambda: next(times)))
    train(session, 2)
    assert session.port.warnings() == [NO_COMMIT]


def test_parameters_are_sampled_early_later_and_at_the_end(session):
    train(session, 150, 1)
    assert session.port.moments() == [1, 10, 100, 0]
    assert session.port[0] == WeightsSampled(3, 5, 1, (1.0, 2.0), ("SGD",))


def test_what_is_no_finite_number_can_be_sent_and_compared(session):
    class Diverged(Sampled):
        values = (1.0, math.nan, -math.inf)

    train(session, 1, 1, Diverged())
    assert session.port[0].values == (1.0, supervision.NOT_FINITE, supervision.NOT_FINITE)
    assert unpack_event(pack_event(session.port[0])) == session.port[0]


@pytest.mark.parametrize(("version", "warnings"), [(0, [NEVER_COMMITTED]), (7, [])])
def test_a_newcomer_to_a_loop_that_commits_need_not(session, version, warnings):
    watched = Supervision(session, Sampled())
    session.version = version
    watched.begun()
    watched.ended()
    watched.close()
    assert session.port.warnings() == warnings


def test_each_generation_is_sampled_anew(session):
    watched = Supervision(session, Sampled())
    for generation in (5, 6):
        session.generation = generation
        watched.begun()
        watched.committed()
    sampled = [(note.generation, note.moment) for note in session.port]
    assert sampled == [(5, 1), (6, 1)]


def test_a_rank_alone_and_a_state_without_parameters_are_not_sampled(session):
    class Empty(Sampled):
        values = ()

    class Odd(Sampled):
        def _sample(self):
            raise RuntimeError("no values here")

    train(session, 3, 1, Empty())
    train(session, 3, 1, Odd())
    session.size = 1
    train(session, 3, 1)
    assert session.port == []


def test_where_the_state_has_no_parameters_those_of_stepped_optimizers_are_sampled(session):
    class Empty(Sampled):
        values = ()

    session.stepped = Sampled()
    session.stepped.sample = lambda: ((3.0,), ("SGD",))
    train(session, 1, 1, Empty())
    assert [(note.values, note.plain) for note in session.port] == [((3.0,), ("SGD",))] * 2


# -- without an elastic loop -----------------------------------------------------------------------


def operate(session, times):
    for _ in range(times):
        session.about_to_exchange()


def test_without_a_loop_operations_are_counted_and_the_end_is_sampled(session):
    operate(session, 3)
    watch(session, lambda: (1.0,))
    operate(session, 50)
    watch(session, lambda: (2.0,))  # in the place of the first
    operate(session, 200)
    session.before_return()
    assert session.port.moments() == [-4, -13, -54, -63, -153, 0]
    session.before_return.close()


def test_a_loop_samples_by_itself(session):
    watch(session, lambda: (1.0,))
    session.next_loop()
    operate(session, 50)
    session.before_return()
    assert session.port == []


def test_outside_a_job_nothing_is_watched():
    context = LocalContext()
    watch(context, lambda: (1.0,))
    assert (context.before_return, context.before_exchange) == (None, ())
