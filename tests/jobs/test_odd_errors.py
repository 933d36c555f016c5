"""Errors and results whose classes do odd things, in real jobs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from nbelastic.errors import JobError, RankFailed


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class NoHeirsError(Exception):
    def __init_subclass__(cls, **options):
        raise SystemExit("no subclasses")


class HidesError(Exception):
    def __getattribute__(self, name):
        raise KeyboardInterrupt(name)


def fail(kind, value):
    import nbelastic.torch as hvd
    from nbelastic.elastic import ObjectState

    hvd.init()

    @hvd.elastic.run
    def train(state):
        raise kind(value)

    train(ObjectState(n=0))


def test_a_frozen_error_of_a_loop_keeps_its_type_and_lines(crew):
    with pytest.raises(FrozenError, match=r"(?s)FrozenError: 7.*raise kind\(value\)") as caught:
        crew.fit(fail, args=[FrozenError, 7], np=1)
    assert isinstance(caught.value, RankFailed)


def test_a_class_that_cannot_be_derived_from_ends_the_job(crew):
    with pytest.raises(RankFailed, match=r"(?s)NoHeirsError: x.*raise kind\(value\)") as caught:
        crew.fit(fail, args=[NoHeirsError, "x"], np=1)
    assert type(caught.value.__cause__) is NoHeirsError


def test_a_class_that_refuses_to_be_looked_into_costs_no_worker(crew):
    workers = crew.workers()
    with pytest.raises(RankFailed) as caught:
        crew.fit(fail, args=[HidesError, "x"], np=1)
    assert type(caught.value) is RankFailed
    assert "HidesError" in str(caught.value)
    assert "raise kind(value)" in str(caught.value)
    assert crew.workers() == workers


def test_a_long_message_is_cut_in_the_history(crew):
    job = crew.fit(fail, args=[ValueError, "x" * 3_000_000], np=1, block=False)
    error = job.exception(30)
    assert len(error.__cause__.args[0]) == 3_000_000
    assert "(3,000,012 characters)" in str(error)
    assert max(len(event.detail) for event in job.history) < 30_000


def leave():
    raise SystemExit(3)


class Exits:
    def __reduce__(self):
        return leave, ()


def test_a_result_whose_module_exits_ends_the_job(crew):
    job = crew.fit(Exits, np=1, block=False)
    with pytest.raises(JobError, match="cannot be read here: SystemExit: 3"):
        job.result(30)
    assert not job.cancel()
    assert job.status.size == 0
