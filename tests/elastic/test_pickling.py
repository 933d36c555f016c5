"""What is sent to the workers keeps the names of its files, whatever cloudpickle does to them."""

import functools
import pickle
import re
import sys
import threading
import types
import weakref

import pytest
import torch

from nbelastic.cluster.kernel.preflight import pack_function
from nbelastic.elastic.state import ObjectState
from nbelastic.elastic.state.transfer import allgather_object
from nbelastic.errors import NbelasticError, NotPicklable
from nbelastic.pickling import dumps
from nbelastic.torch.state.torch_state import TorchState
from tests.support.world import run_ranks

SOURCE = """
def outer():
    def inner():
        return [number for number in (1, 2)]
    return inner
class Model:
    def forward(self):
        return 3
"""


def sent(value):
    return pickle.loads(dumps(value))


def in_a_state(kind):
    def send(value):
        def main(context):
            state = kind(value=value if context.rank == 0 else None)
            state.align([1])
            return state.value

        return run_ranks(2, main)[1]

    return send


def gathered(value):
    def main(context):
        return allgather_object(context.communicator(), None if context.rank else value)[0]

    return run_ranks(2, main)[1]


@pytest.mark.parametrize("send", [sent, in_a_state(ObjectState), in_a_state(TorchState), gathered])
def test_functions_and_classes_of_a_cell_keep_their_file(send):
    cell = {"__name__": "__main__"}
    exec(compile(SOURCE, "/tmp/cell.py", "exec"), cell)
    outer, model = send((cell["outer"], cell["Model"]()))
    for function in (outer, outer(), type(model).forward):
        assert function.__code__.co_filename == "/tmp/cell.py"
    assert (outer().__code__.co_firstlineno, outer()(), model.forward()) == (3, [1, 2], 3)


CACHED = """
import functools

@functools.lru_cache(maxsize=7, typed=True)
def square(x):
    return x * x

@functools.cache
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

class Table:
    @functools.cached_property
    def size(self):
        return 5

def outer():
    @functools.cache
    def inner():
        return fib(30)
    return inner
"""


def test_cached_functions_of_main_are_sent_by_value(monkeypatch):
    space = {"__name__": "__main__"}
    exec(compile(CACHED, "/tmp/cell.py", "exec"), space)
    with monkeypatch.context() as main:
        for name in ("square", "fib"):
            main.setattr(sys.modules["__main__"], name, space[name], raising=False)
        data = dumps((space["square"], space["outer"](), space["Table"]()))
    square, inner, table = pickle.loads(data)  # as where __main__ has none of them
    assert (square(3), inner(), table.size) == (9, 832040, 5)
    assert square.cache_parameters() == {"maxsize": 7, "typed": True}


@functools.cache
def importable():
    return 1


def test_cached_functions_of_modules_are_sent_by_name_and_a_generator_is_not():
    assert sent(importable) is importable
    with pytest.raises(TypeError, match="generator"):
        dumps(number for number in (1, 2))


LOCK = threading.Lock()


def uses_lock():
    return LOCK


def uses_helper():
    return uses_lock()


class HasLock:
    def __init__(self):
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("args", "place"),
    [
        ([{"a": [1, {"b": LOCK}]}], r"args[0] (a dict; there ['a'][1]['b'] is a lock)"),
        (
            [types.SimpleNamespace(inner=HasLock())],
            "args[0] (a SimpleNamespace; there .inner.lock is a lock)",
        ),
        ([LOCK], "args[0] (a lock)"),
        ([uses_helper], "the variable 'uses_lock' that uses_helper() uses, the variable 'LOCK'"),
    ],
)
def test_the_error_of_a_job_says_where_the_lock_is(args, place, monkeypatch):
    monkeypatch.setattr(uses_lock, "__module__", "__main__")
    monkeypatch.setattr(uses_helper, "__module__", "__main__")
    with pytest.raises(NotPicklable, match=re.escape(place)):
        pack_function(print, tuple(args), {})


VALUES = {
    "lock": (threading.Lock, "state.value (a lock) cannot be copied at each commit"),
    "in containers": (lambda: {"a": [LOCK]}, "state.value['a'][0] (a lock)"),
    "in an object": (HasLock, "state.value.lock (a lock)"),
    "part of a graph": (
        lambda: types.SimpleNamespace(hidden=torch.ones(1, requires_grad=True) * 2),
        "state.value.hidden (a Tensor) cannot be copied at each commit: Only Tensors created "
        "explicitly by the user (graph leaves) support the deepcopy protocol at the moment. Values",
    ),
}


@pytest.mark.parametrize("kind", [ObjectState, TorchState])
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("when", ["built", "later"])
def test_a_value_that_cannot_be_copied_is_named(kind, name, when):
    make, message = VALUES[name]

    def build():
        if when == "built":
            kind(epoch=0, value=make())
        else:
            state = kind(epoch=0, value=None)
            state.value = make()
            state.save()

    with pytest.raises(NbelasticError, match=re.escape(message)):
        build()


@pytest.mark.parametrize("kind", [ObjectState, TorchState])
def test_a_value_that_cannot_be_sent_is_named(kind):
    state = kind(epoch=0, value={"refs": [weakref.ref(HasLock)]})
    place = r"state.value['refs'][0] (a ReferenceType) cannot be sent to other ranks or to a check"
    for pack in (state._pack, state._pack_commit):
        with pytest.raises(NbelasticError, match=re.escape(place)):
            pack()
