"""What a job asks for before it begins, and where an error of a rank was raised."""

import asyncio
import pickle

import pytest
from distributed import Future
from distributed.comm import CommClosedError

from nbelastic.cluster.kernel import preflight
from nbelastic.cluster.kernel.preflight import check_versions, pack_function
from nbelastic.cluster.wire import versions
from nbelastic.errors import NotPicklable, VersionMismatch
from nbelastic.messages import CodeLine, PackedError

HERE = versions()


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


def test_each_difference_is_told_and_a_worker_that_is_dying_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(preflight, "ANSWER_TIMEOUT", 0.05)
    answers = {"a": HERE, "dying": CommClosedError("connection reset by peer"), "frozen": None}
    check_versions(FakeClient(**answers))
    answers |= {"b": {**HERE, "torch": "1.0", "python": "2.7"}, "odd": ImportError("no module")}
    with pytest.raises(VersionMismatch) as caught:
        check_versions(FakeClient(**answers))
    b, torch, odd = str(caught.value).splitlines()[1:4]
    assert b.startswith("  b has python 2.7") and torch.startswith("  b has torch 1.0")
    assert odd.startswith("  odd could not be asked: ImportError('no module')")


# -- what a function is called with ----------------------------------------------------------------


class Promise(Future):
    """A future of no client."""

    key, status = "load-1", "pending"
    __hash__ = object.__hash__
    __init__ = __del__ = lambda self: None


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
        (print, ([1, {"data": {promise}}],), {}, r"^\[1\]\['data'\]\[an element\] of args\[0\] is"),
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
    assert callable(pickle.loads(packed[0].call)[0])


# -- where an error of a rank was raised ----------------------------------------------------------

USERS = "/home/me/train.py"


def test_the_place_of_an_error_is_the_users_line():
    def place(*files):
        packed = PackedError("", tuple(CodeLine(file, 1, "f", "") for file in files), b"")
        return packed.place.file if packed.place else None

    for theirs in (
        "/opt/venv/lib/python3.11/site-packages/torch/autograd/function.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "/usr/lib/python3.11/contextlib.py",
        r"C:\Python311\Lib\site-packages\torch\nn.py",
    ):
        assert place("/home/me/a.py", theirs, USERS, theirs) == USERS
        assert place(theirs, "<ipython-input-3>", theirs) == "<ipython-input-3>", "a cell"
        assert place(theirs) == theirs, "there is no other"
    assert place() is None
