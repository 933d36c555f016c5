"""Whose versions a job asks for before it begins, and what it makes of the answers."""

import asyncio

import pytest
from distributed import Future
from distributed.comm import CommClosedError

from nbelastic.cluster.kernel import preflight
from nbelastic.cluster.kernel.preflight import check_versions, pack_function
from nbelastic.cluster.payload import unpack_call
from nbelastic.cluster.worker import environment
from nbelastic.errors import NotPicklable, VersionMismatch

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


# -- what a function is called with ----------------------------------------------------------------


class Promise(Future):
    """A future of no client."""

    def __init__(self):
        self.key = "load-1"

    status = "pending"
    __hash__ = object.__hash__

    def __del__(self):
        pass


promise = Promise()


def uses_a_global():
    return promise


def make_closure():
    outer = [promise]
    return lambda: outer


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "where"),
    [
        (print, (1, promise), {}, r"^args\[1\] is"),
        (print, ([1, (2, promise)],), {}, r"^\[1\]\[1\] of args\[0\] is"),
        (print, ({"data": {promise}},), {}, r"^\['data'\]\[an element\] of args\[0\] is"),
        (print, (), {"data": promise}, r"^the argument 'data' is"),
        (uses_a_global, (), {}, r"^the variable 'promise' that uses_a_global\(\) uses is"),
        (make_closure(), (), {}, r"^\[0\] of the variable 'outer' that <lambda>\(\) uses is"),
        (lambda data=promise: data, (), {}, r"^the default of 'data' is"),
    ],
)
def test_a_future_is_refused_by_name(function, args, kwargs, where):
    with pytest.raises(NotPicklable, match=where + r" a Dask Future \(pending\).*result\(\)"):
        pack_function(function, args, kwargs)


def test_functions_that_cannot_be_looked_into_travel_all_the_same():
    def outer():
        def inner():
            return late

        packed = pack_function(inner, (list(range(100_000)),), {})
        late = 1
        return packed, late

    packed, _ = outer()
    assert callable(unpack_call(packed[0])[0])
