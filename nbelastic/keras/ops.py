"""Operations between ranks on arrays and tensors of any back end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbelastic.keras.backends import backend
from nbelastic.torch import functions as broadcasts
from nbelastic.torch.compression import Compression, Compressor
from nbelastic.torch.ops import functions, reductions

if TYPE_CHECKING:
    from nbelastic.collectives import Op
    from nbelastic.torch.ops.operation import GradientOp


def _applied(value: Any, operation: Callable[..., torch.Tensor], *more: Any) -> Any:
    """Apply an operation of PyTorch's face, and return what kind of value was given."""
    if isinstance(value, (int, float, bool, np.number)):
        return operation(torch.tensor(value), *more).item()
    if isinstance(value, (np.ndarray, list, tuple)):
        return operation(torch.as_tensor(np.asarray(value)), *more).numpy()
    back = backend()
    return back.from_torch(operation(back.to_torch(value), *more))


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Op | GradientOp | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Reduce a number, an array or a tensor over all ranks.

    Parameters
    ----------
    value : number, array, or tensor or variable of Keras
        Of the same shape and type on all ranks.
    name, average, prescale_factor, postscale_factor, op, compression
        As for :func:`nbelastic.torch.allreduce`.

    Returns
    -------
    number, array or tensor
        As `value`.
    """
    factors = prescale_factor, postscale_factor
    return _applied(value, reductions.allreduce, average, name, compression, op, *factors)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the values of all ranks, one after the other along the first axis.

    Parameters
    ----------
    value : array, or tensor or variable of Keras
        Its first axis may differ by rank.
    name : str, optional
        Equal on all ranks.
    """
    return _applied(value, functions.allgather, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of one rank.

    Parameters
    ----------
    value : number, array, or tensor or variable of Keras
        Of the same shape and type on all ranks.
    root_rank : int
        The rank.
    name : str, optional
        Equal on all ranks.
    """
    return _applied(value, functions.broadcast, root_rank, name)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: Op = reductions.Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce over all ranks, and return this rank's part along the first axis.

    Parameters
    ----------
    value : array, or tensor or variable of Keras
        Of the same shape and type on all ranks.
    name, op, prescale_factor, postscale_factor
        As for :func:`nbelastic.torch.reducescatter`.
    """
    options = name, Compression.none, op, None, prescale_factor, postscale_factor
    return _applied(value, reductions.reducescatter, *options)


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Broadcast the values of variables from `root_rank`.

    Parameters
    ----------
    variables : list of variables of Keras, or of the back end
        The same on all ranks: ``[*model.variables, *optimizer.variables]``.
    root_rank : int, default 0
        The rank.
    """
    back = backend()
    values = back.read(variables)
    if not back.in_place:
        values = [each.clone() for each in values]
    named = [(f"variable {number}", each) for number, each in enumerate(values)]
    broadcasts.broadcast_parameters(named, root_rank)
    if not back.in_place:
        back.write(variables, values)


def broadcast_global_variables(root_rank: int) -> None:
    """Refuse, because Keras 3 has no global variables.

    Raises
    ------
    RuntimeError
        Always, with what to call instead.
    """
    raise RuntimeError(
        "broadcast_global_variables: Keras 3 keeps no list of all variables; call "
        f"hvd.broadcast_variables([*model.variables, *model.optimizer.variables], {root_rank}), or "
        "use BroadcastGlobalVariablesCallback"
    )
