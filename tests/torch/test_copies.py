"""Copies that are taken again, beside tensors that are uncopied."""

from __future__ import annotations

import weakref

import torch

from nbelastic.torch.state.commit import Copies


def test_what_is_not_held_is_copied_each_time() -> None:
    uncopied, other = torch.zeros(2), torch.zeros(3)
    ids = frozenset([id(uncopied)])
    copies = Copies()
    for number in range(4):
        other.fill_(number)
        copies.take([uncopied, other], ids)
        other.fill_(-1)
        assert copies.values[0] is uncopied
        assert copies.values[1].tolist() == [number] * 3


def test_what_is_no_longer_copied_is_given_back_the_next_time() -> None:
    tensors = [torch.zeros(2), torch.ones(3)]
    ids = frozenset(map(id, tensors))
    copies = Copies()
    copies.take(tensors)
    copied = [weakref.ref(each) for each in copies.values]
    copies.take(tensors, ids)
    assert copies.values == tensors
    assert all(each() is not None for each in copied)  # while others may be waiting
    copies.take(tensors, ids)
    assert all(each() is None for each in copied)
