"""A rank that fails to start by an error of Python's own is started once more."""

from __future__ import annotations

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.errors import RankFailed
from tests.support.clusters import kinds


def hit_once(marks):
    """Fail on one rank as CPython 3.11 does where two threads parse at the same time."""
    import os

    hvd.init()
    if hvd.rank() == 1 and not os.path.exists(f"{marks}/hit"):
        os.mkdir(f"{marks}/hit")
        try:
            raise SystemError("AST constructor recursion depth mismatch (before=30, after=31)")
        except SystemError as error:
            raise ImportError("torch cannot be imported") from error
    return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def always():
    raise SystemError("AST constructor recursion depth mismatch (before=30, after=31)")


def test_a_start_that_fails_by_an_error_of_pythons_own_is_tried_once_more(crew, tmp_path):
    job = crew.fit(hit_once, args=[str(tmp_path)], np=2)
    assert job.results() == [2.0, 2.0]
    assert kinds(job).count("lost") == 1


def test_where_it_fails_again_the_error_is_told(crew):
    with pytest.raises(RankFailed, match="AST constructor") as caught:
        crew.fit(always, np=2)
    assert isinstance(caught.value, SystemError)
