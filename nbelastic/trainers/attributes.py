"""Attributes of callbacks that a commit can keep."""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None), torch.Tensor)


def plain_attributes(obj: object) -> dict[str, Any]:
    """Return attributes that are numbers, strings or tensors, or lists and dicts of them."""
    return {name: value for name, value in vars(obj).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)
