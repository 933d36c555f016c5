"""Descriptions of operations, which ranks compare before data moves.

A description is one line, followed by a line for each of several tensors (see
:meth:`nbelastic.collectives.Communicator.agree`). Its pattern is cheaper to make and to compare:
the head of the line, with the types and shapes of the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def kind(dtype: torch.dtype, shape: Sequence[object]) -> str:
    """Return a type and a shape in words: ``float32[2, 3]``."""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def kinds(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return types and shapes of tensors, for a pattern."""
    return tuple((tensor.dtype, tensor.shape) for tensor in tensors)


def kinds_of_rows(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return types and shapes of tensors whose first dimension may differ between ranks."""
    return tuple((tensor.dtype, ("*", *tensor.shape[1:])) for tensor in tensors)


def in_words(pattern: Any) -> str:
    """Return a pattern as text: what is text already, or a head and types with shapes."""
    if isinstance(pattern, str):
        return pattern
    head, found = pattern
    if len(found) == 1:
        return f"{head} of {kind(*found[0])}"
    details = "\n".join(f"tensor {index} is {kind(*each)}" for index, each in enumerate(found))
    return f"{head} of {len(found)} tensors\n{details}"


def reduction(verb: str, how: str, prescale: float, postscale: float) -> str:
    """Return a reduction in words, with its factors if they are not 1."""
    if prescale != 1.0:
        how += f" of {float(prescale)} times each"
    if postscale != 1.0:
        how += f", times {float(postscale)}"
    return f"{verb} ({how})"


def called(verb: str, name: str | None) -> str:
    """Return an operation with its name, if any."""
    return verb if name is None else f"{verb} {name!r}"
