"""What is sent to the workers keeps the names of its files, whatever cloudpickle does to them."""

from __future__ import annotations

import cloudpickle
import pytest

from nbelastic.elastic.state import ObjectState
from nbelastic.elastic.transfer import allgather_object
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


@pytest.fixture
def cell():
    """Functions and a class as a notebook's cell makes them."""
    space = {"__name__": "__main__"}
    exec(compile(SOURCE, "/tmp/cell.py", "exec"), space)
    return space


def test_functions_and_what_they_define_keep_their_file(cell):
    outer = cloudpickle.loads(dumps(cell["outer"]))
    assert outer.__code__.co_filename == "/tmp/cell.py"
    assert outer().__code__.co_filename == "/tmp/cell.py"
    assert outer().__code__.co_firstlineno == 3
    assert outer()() == [1, 2]


def test_methods_of_classes_keep_their_file(cell):
    model = cloudpickle.loads(dumps(cell["Model"]))
    assert model.forward.__code__.co_filename == "/tmp/cell.py"
    assert model().forward() == 3


def test_what_cannot_be_pickled_says_so():
    with pytest.raises(TypeError, match="generator"):
        dumps(number for number in (1, 2))


@pytest.mark.parametrize("kind", [ObjectState, TorchState])
def test_classes_that_travel_in_a_state_keep_their_file(cell, kind):
    states = [kind(net=cell["Model"]() if rank == 0 else None) for rank in range(2)]

    def main(context):
        states[context.rank].align([1])
        return type(states[context.rank].net).forward.__code__.co_filename

    assert run_ranks(2, main) == ["/tmp/cell.py"] * 2


def test_classes_that_travel_by_themselves_keep_their_file(cell):
    def main(context):
        mine = cell["Model"] if context.rank == 0 else None
        (gathered, _) = allgather_object(context.communicator(), mine)
        return gathered.forward.__code__.co_filename

    assert run_ranks(2, main) == ["/tmp/cell.py"] * 2
