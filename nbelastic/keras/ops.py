"""Operations between ranks on numbers, arrays, tensors and variables.

Each is the operation of :mod:`nbelastic.torch` of the same name, with the same arguments. It
returns what kind of value it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nbelastic.collectives import Op
from nbelastic.keras.backends import backend
from nbelastic.torch import functions as broadcasts
from nbelastic.torch.compression import Compression, Compressor
from nbelastic.torch.ops import functions, reductions
from nbelastic.torch.ops.operation import GradientOp


def _applied(value: Any, operation: Callable[..., torch.Tensor], *more: Any) -> Any:
    """Apply an operation of PyTorch's face, and return what kind of value was given."""
    if isinstance(value, (int, float, bool, np.number)):
        return operation(torch.tensor(value), *more).item()
    if isinstance(value, (np.ndarray, list, tuple)):
        return operation(torch.as_tensor(np.asarray(value)), *more).numpy()
    back = backend()
    return back.from_torch(operation(back.to_torch(value).detach(), *more))


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Op | GradientOp | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Reduce a value over all ranks; as :func:`nbelastic.torch.allreduce`."""
    factors = prescale_factor, postscale_factor
    return _applied(value, reductions.allreduce, average, name, compression, op, *factors)


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate the values of all ranks; as :func:`nbelastic.torch.allgather`."""
    return _applied(value, functions.allgather, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of rank `root_rank`; as :func:`nbelastic.torch.broadcast`."""
    return _applied(value, functions.broadcast, root_rank, name)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: Op = reductions.Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce over all ranks, and return this rank's rows: :func:`nbelastic.torch.reducescatter`."""
    options = name, Compression.none, op, None, prescale_factor, postscale_factor
    return _applied(value, reductions.reducescatter, *options)


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Broadcast the values of variables from `root_rank`; all ranks pass the same variables.

    ``hvd.broadcast_variables([*model.variables, *optimizer.variables])``
    """
    back = backend()
    values = [each.clone() for each in back.read(variables)]
    named = [(f"variable {number}", each) for number, each in enumerate(values)]
    broadcasts.broadcast_parameters(named, root_rank)
    back.write(variables, values)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise a RuntimeError with what to call, because Keras 3 has no global variables."""
    raise RuntimeError(
        "broadcast_global_variables: Keras 3 keeps no list of all variables; call "
        f"hvd.broadcast_variables([*model.variables, *model.optimizer.variables], {root_rank}), or "
        "use BroadcastGlobalVariablesCallback"
    )
