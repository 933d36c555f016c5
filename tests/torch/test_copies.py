"""Copies that are taken again, beside tensors that are held."""

from __future__ import annotations

import torch

from nbelastic.torch.copies import Copies


def test_what_is_not_held_is_copied_each_time() -> None:
    held, other = torch.zeros(2), torch.zeros(3)
    ids = frozenset([id(held)])
    copies = Copies()
    for number in range(4):
        other.fill_(number)
        copies.take([held, other], ids)
        other.fill_(-1)
        assert copies.values[0] is held
        assert copies.values[1].tolist() == [number] * 3
