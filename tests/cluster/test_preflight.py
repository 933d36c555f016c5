"""Whose versions a job asks for before it begins, and what it makes of the answers."""

import asyncio

import pytest
from distributed.comm import CommClosedError

from nbelastic.cluster import environment, preflight
from nbelastic.cluster.preflight import check_versions
from nbelastic.errors import VersionMismatch

HERE = environment.versions()


class FakeClient:
    """A cluster of which each worker gives one answer; None: it gives none."""

    def __init__(self, **answers):
        self.answers = answers

    def run_on_scheduler(self, function):
        takes_none = function.__code__.co_argcount == 0
        return HERE if takes_none else list(self.answers)

    def sync(self, function, *arguments):
        return asyncio.run(function(*arguments))

    async def _run(self, _function, *, workers, on_error):
        assert on_error == "return"
        (address,) = workers
        answer = self.answers[address]
        if answer is None:
            await asyncio.sleep(60)
        return {address: answer}


def test_equal_versions_are_all_right():
    check_versions(FakeClient(one=HERE, other=HERE))


def test_each_difference_is_told():
    other = {**HERE, "torch": "1.0", "python": "2.7"}
    with pytest.raises(VersionMismatch, match=r"b has python 2\.7.*\n.*b has torch 1\.0") as caught:
        check_versions(FakeClient(a=HERE, b=other))
    assert "a has" not in str(caught.value)


def test_a_worker_that_is_dying_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(preflight, "ANSWER_TIMEOUT", 0.05)
    closed = CommClosedError("in <TCP>: connection reset by peer")
    check_versions(FakeClient(alive=HERE, dying=closed, frozen=None))


def test_a_worker_that_cannot_run_anything_is_named():
    with pytest.raises(VersionMismatch, match=r"odd could not be asked: .*no module"):
        check_versions(FakeClient(odd=ImportError("no module")))
