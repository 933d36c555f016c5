"""Values of a state that the function also refers to by other names."""

import copy
import enum
import pickle
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from nbelastic.elastic import ObjectState
from nbelastic.torch.state.torch_state import TorchState
from tests.elastic.members import job, resumed
from tests.support.world import run_ranks


@dataclass
class Record:
    best: float = 0.0
    losses: list[float] = field(default_factory=list)


def in_object(each):
    each.best += 1.0
    each.losses.append(2.0)
    each.more = [3]


def in_namespace(each):
    each.steps += 1
    each.log.append(1)


MAKE = {  # a value, and a change in place
    "list": (lambda: [0], lambda each: each.append(each[-1] + 1)),
    "dict of lists": (lambda: {"loss": [], "step": 0}, lambda each: each["loss"].append(1)),
    "ordered dict": (lambda: OrderedDict.fromkeys("abcdefgh", 1), OrderedDict.popitem),
    "defaultdict": (lambda: defaultdict(list, loss=[0]), lambda each: each["loss"].append(1)),
    "counter": (lambda: Counter(a=2, b=1), lambda each: each.update(a=5)),
    "set": (lambda: {0}, lambda each: each.add(len(each))),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda each: each.append(each[-1] + 1)),
    "array": (lambda: np.zeros(3), lambda each: each.put(0, each[0] + 1)),
    "dataclass": (Record, in_object),
    "namespace": (lambda: types.SimpleNamespace(steps=0, log=[]), in_namespace),
    "random": (lambda: random.Random(3), lambda each: each.random()),
    "generator": (lambda: np.random.default_rng(3), lambda each: each.random()),
    "old generator": (lambda: np.random.RandomState(3), lambda each: each.rand()),
    "tuple of lists": (lambda: ([0], "b"), lambda each: each[0].append(1)),
    "tensor": (lambda: torch.zeros(2), lambda each: each.add_(1.0)),
}


def content(value):
    """Return what can be compared of a value."""
    if isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
        return pickle.dumps(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, dict):
        return {key: content(each) for key, each in value.items()}
    return copy.deepcopy(getattr(value, "__dict__", value))


pytestmark = pytest.mark.parametrize("kind", [ObjectState, TorchState])


@pytest.mark.parametrize("name", MAKE)
def test_an_alias_goes_back_with_the_state(kind, name):
    make, change = MAKE[name]
    alias = make()
    state = kind(value=alias, other=1)
    for _ in range(2):
        change(alias)
        state.save()
        at_commit = content(alias)
        for _ in range(2):
            change(alias)
            assert content(alias) != at_commit
            state.restore()
            assert content(alias) == content(state.value) == at_commit
            assert state.value is alias or name == "tuple of lists"
    if name == "tuple of lists":
        assert state.value[0] is alias[0]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("way", ["newcomer", "checkpoint"])
def test_an_alias_on_another_rank_gets_the_values(kind, name, way, tmp_path):
    make, change = MAKE[name]
    aliases = []

    def build():
        aliases.append(make())
        return kind(value=aliases[-1], other=1)

    def main(context):
        mine = make()
        state = kind(value=mine, other=1)
        if context.rank == 0:
            change(mine)
        state.align([1])
        return state, mine

    if way == "newcomer":
        state, alias = run_ranks(2, main)[1]
    else:
        job(tmp_path, build, lambda state: change(state.value))
        state, alias = resumed(tmp_path, build)[0], aliases[-1]
    expected = make()
    change(expected)
    assert content(alias) == content(state.value) == content(expected)
    assert state.value is alias or name == "tuple of lists"
    change(alias)
    assert content(state.value) == content(alias)


def test_an_alias_of_a_part_goes_back_too(kind):
    losses = []
    record = Record(losses=losses)
    state = kind(history={"loss": losses, "record": record}, again=losses)
    losses.append(1)
    state.save()
    losses.append(2)
    record.best = 5.0
    state.restore()
    assert losses == [1]
    assert state.history["loss"] is state.again is state.history["record"].losses is losses
    assert record.best == 0.0


def test_a_value_that_was_assigned_leaves_what_it_was_before_alone(kind):
    """A row of the user's data in the state is not overwritten by another row."""
    data = [[0], [1], [2]]
    state = kind(row=data[0])
    state.row = data[1]
    state.save()
    state.row = data[2]
    state.restore()
    assert data == [[0], [1], [2]]
    assert state.row is data[1]

    def main(context):
        rows = [[0], [1], [2]]
        state = kind(row=rows[0])
        if context.rank == 0:
            state.row = rows[2]
        state.align([1])
        return rows, state.row

    assert run_ranks(2, main) == [([[0], [1], [2]], [2])] * 2


class Color(enum.Enum):
    RED = 1


class Own(list):
    """A list with more than its items."""


@dataclass(slots=True)
class Slots:
    a: int = 1


class Both(Slots):
    """A class with attributes besides slots."""


@pytest.mark.parametrize(
    "make", [lambda: Color.RED, lambda: Own([1]), Both, lambda: frozenset([1]), lambda: object]
)
def test_other_values_are_replaced_by_copies(kind, make):
    state = kind(value=make())
    state.save()
    if make is Both:
        state.value.a = 2
    state.value = None
    state.restore()
    assert type(state.value) is type(make())
    assert make is not Both or state.value.a == 1
    if isinstance(state.value, (Own, frozenset)):
        assert [*state.value] == [1]


def test_an_array_of_another_shape_or_not_to_be_written_is_replaced(kind):
    alias = np.zeros(3)
    state = kind(value=alias)
    state.value = np.zeros(4)
    state.restore()
    assert state.value is alias
    frozen = np.zeros(3)
    state = kind(value=frozen)
    frozen.flags.writeable = False
    state.restore()
    assert state.value.tolist() == [0, 0, 0]
