"""The states of random generators, taken again and again."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbelastic.torch.state.commit import GeneratorStates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "python": random.random,
    "half of python's pair": lambda: random.gauss(0, 1),  # so does this one
    "python's seed": lambda: random.seed(7),
    "torch": lambda: torch.rand(3),
    "numpy": lambda: np.random.rand(3),
    "half of a pair": np.random.randn,  # the next one draws no bits
    "many": lambda: np.random.rand(1000),
    "seed": lambda: np.random.seed(7),
}


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    states = GeneratorStates()
    yield
    states.restore()


def drawn() -> list[float]:
    some = [
        random.gauss(0, 1),
        random.gauss(0, 1),
        random.random(),
        float(np.random.randn()),
        float(np.random.randn()),
    ]
    return [*some, float(np.random.rand()), float(torch.rand(1))]


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=6))
def test_states_that_learn_from_earlier_ones_restore_what_fresh_ones_do(draws: list[str]) -> None:
    np.random.seed(1)
    random.seed(1)
    states = GeneratorStates()
    for name in draws:
        DRAWS[name]()
        states = GeneratorStates(states)
    fresh = GeneratorStates()
    expected = drawn()
    for each in (states, fresh):
        each.restore()
        assert drawn() == expected


def test_another_bit_generator_is_restored_too() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        states = GeneratorStates(GeneratorStates())
        expected = drawn()
        states.restore()
        assert drawn() == expected
    finally:
        np.random.set_bit_generator(before)


def test_another_generator_of_the_same_kind_is_not_taken_for_the_one_before() -> None:
    before = np.random.get_bit_generator()
    states = GeneratorStates()
    np.random.set_bit_generator(np.random.MT19937(3))
    try:
        states = GeneratorStates(states)
        expected = drawn()
        states.restore()
        assert drawn() == expected
        states = GeneratorStates(states)
    finally:
        np.random.set_bit_generator(before)
    states = GeneratorStates(states)
    expected = drawn()
    states.restore()
    assert drawn() == expected
