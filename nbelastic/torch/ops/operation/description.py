"""Descriptions of operations, which ranks compare before data moves.

A description is one line, followed by a line for each of several tensors (see
:meth:`nbelastic.collectives.Communicator.agree`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from nbelastic.collectives import Op
    from nbelastic.torch.ops.operation.adasum import GradientOp


def kind(dtype: torch.dtype, shape: Sequence[object]) -> str:
    """Return a type and a shape in words: ``float32[2, 3]``."""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def of_tensors(head: str, tensors: Sequence[torch.Tensor]) -> str:
    """Return `head` followed by types and shapes of the tensors."""
    return in_words((head, tuple((tensor.dtype, tensor.shape) for tensor in tensors)))


def in_words(pattern: Any) -> str:
    """Return a pattern as text: what is text already, or a head and types with shapes."""
    if isinstance(pattern, str):
        return pattern
    head, kinds = pattern
    if len(kinds) == 1:
        return f"{head} of {kind(*kinds[0])}"
    details = "\n".join(f"tensor {index} is {kind(*each)}" for index, each in enumerate(kinds))
    return f"{head} of {len(kinds)} tensors\n{details}"


def reduction(
    verb: str,
    op: Op | GradientOp,
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> str:
    """Return a reduction in words, with its factors if they are not 1."""
    how = op.value if prescale == 1.0 else f"{op.value} of {float(prescale)} times each"
    if postscale != 1.0:
        how += f", times {float(postscale)}"
    return of_tensors(f"{called(verb, name)} ({how})", tensors)


def broadcast(root: int, tensors: Sequence[torch.Tensor], name: str | None = None) -> str:
    """Return a broadcast in words."""
    return of_tensors(f"{called('broadcast', name)} from rank {root}", tensors)


def rows(verb: str, tensors: Sequence[torch.Tensor], name: str | None = None) -> str:
    """Return an operation on rows, which may differ in number between ranks, in words."""
    kinds = [kind(each.dtype, ("*", *each.shape[1:]) if each.dim() else ("*",)) for each in tensors]
    if len(kinds) == 1:
        return f"{called(verb, name)} of {kinds[0]}"
    details = [f"tensor {index} is {what}" for index, what in enumerate(kinds)]
    return "\n".join([f"{called(verb, name)} of {len(kinds)} tensors", *details])


def called(verb: str, name: str | None) -> str:
    """Return an operation with its name, if it has one."""
    return verb if name is None else f"{verb} {name!r}"
