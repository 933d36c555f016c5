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
