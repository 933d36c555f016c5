"""Making ranks equal: parameters, optimizer state and objects of one rank, on all of them."""

# ruff: noqa: ARG001 - `name` is accepted for Horovod's signatures

from __future__ import annotations

import collections
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nbelastic.elastic.context import current
from nbelastic.pickling import dumps
from nbelastic.torch import ops
from nbelastic.torch.fusion import Chunk, plan
from nbelastic.torch.world import check_process_set

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.collectives import Communicator, Handle

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

T = TypeVar("T")

IN_FLIGHT = 2


def broadcast_parameters(
    params: Mapping[str, torch.Tensor]
    | Iterable[tuple[str, torch.Tensor]]
    | Iterable[torch.Tensor],
    root_rank: int = 0,
    process_set: object = None,
) -> None:
    """Make parameters and buffers those of rank `root_rank`, in place.

    Few large broadcasts take place, not one per tensor. If one fails, each tensor is either as it
    was or the root's.

    Parameters
    ----------
    params : dict, or iterable of (name, tensor) or of tensors
        ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
    root_rank : int, default 0
        Whose values the others take.
    process_set : None
        Only all ranks.

    Raises
    ------
    CollectiveError
        A peer is gone, or the generation is over.
    ValueError
        Names, shapes or types are not those of the root, or a value is no tensor.
    """
    check_process_set(process_set)
    named = _named(params)
    communicator = current().communicator()
    if communicator.size == 1:
        return
    mine = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named]
    theirs = broadcast_object(mine, root_rank)
    if mine != theirs:
        raise ValueError(_difference(mine, theirs, communicator.rank, root_rank))
    tensors = [tensor for _, tensor in named]
    _broadcast(communicator, tensors, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, process_set: object = None
) -> None:
    """Make an optimizer's state and options those of rank `root_rank`.

    Nothing is stepped to create state, so parameters stay what they are, and a root without state
    leaves the others without.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Over the same parameters on all ranks.
    root_rank : int, default 0
        Whose state the others take.
    process_set : None
        Only all ranks.

    Raises
    ------
    CollectiveError
        A peer is gone, or the generation is over; the optimizer is as it was.
    ValueError
        The optimizer's parameter groups are not those of the root.
    """
    check_process_set(process_set)
    communicator = current().communicator()
    if communicator.size == 1:
        return
    tensors: list[torch.Tensor] = []
    is_root = communicator.rank == root_rank
    skeleton: Any = _take_out(optimizer.state_dict(), tensors) if is_root else None
    skeleton = broadcast_object(skeleton, root_rank)
    if not is_root:
        skeleton = _make_room(skeleton, tensors)
    _broadcast(communicator, tensors, root_rank)
    if not is_root:
        optimizer.load_state_dict(skeleton)


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: object = None
) -> T:
    """Return the `obj` of rank `root_rank`: itself there, a copy elsewhere.

    Parameters
    ----------
    obj : object
        On the root: anything that cloudpickle can pickle. Elsewhere not used.
    root_rank : int, default 0
        Whose object all return.
    name : str, optional
        Not used.
    process_set : None
        Only all ranks.

    Raises
    ------
    CollectiveError
        A peer is gone, or the generation is over.
    """
    check_process_set(process_set)
    communicator = current().communicator()
    if communicator.size == 1:
        return obj
    is_root = communicator.rank == root_rank
    payload = _encode(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([payload.numel()], dtype=torch.int64)
    ops.broadcast(communicator, [length], [length], root_rank).wait()
    if not is_root:
        payload = torch.empty(int(length), dtype=torch.uint8)
    ops.broadcast(communicator, [payload], [payload], root_rank).wait()
    return obj if is_root else _decode(payload)


def allgather_object(obj: T, name: str | None = None, process_set: object = None) -> list[T]:
    """Return the `obj` of every rank, in the order of the ranks; this rank's is `obj` itself.

    Raises
    ------
    CollectiveError
        A peer is gone, or the generation is over.
    """
    check_process_set(process_set)
    communicator = current().communicator()
    if communicator.size == 1:
        return [obj]
    pending, lengths = ops.allgather(communicator, _encode(obj))
    payloads = torch.split(pending.wait(), lengths)
    return [
        obj if rank == communicator.rank else _decode(payload)
        for rank, payload in enumerate(payloads)
    ]


@dataclass(frozen=True)
class _Place:
    """Stands in a pickled structure for a tensor that travels apart."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Replace the tensors in nested containers by places and append them to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(tuple(value.shape), value.dtype)
    return _rebuild(value, lambda part: _take_out(part, tensors))


def _make_room(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Replace places by tensors to receive into, each with memory of its own."""
    if isinstance(value, _Place):
        tensors.append(torch.empty(value.shape, dtype=value.dtype))
        return tensors[-1]
    return _rebuild(value, lambda part: _make_room(part, tensors))


def _rebuild(value: Any, change: Any) -> Any:
    if type(value) is dict:
        return {key: change(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(part) for part in value)
    return value


def _broadcast(communicator: Communicator, tensors: Sequence[torch.Tensor], root: int) -> None:
    """Broadcast in place with at most two chunks beside the tensors themselves."""
    waiting: collections.deque[tuple[Handle, Chunk]] = collections.deque()

    def finish_one() -> None:
        handle, chunk = waiting.popleft()
        handle.wait()
        if communicator.rank != root:
            chunk.write_back(tensors)

    for indices in plan(tensors):
        if len(waiting) == IN_FLIGHT:
            finish_one()
        chunk = Chunk(tensors, indices)
        if communicator.rank == root:
            chunk.fill(tensors)
        waiting.append((communicator.broadcast_async(chunk.buffer, root), chunk))
    while waiting:
        finish_one()


def _encode(obj: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(dumps(obj)), dtype=torch.uint8)


def _decode(payload: torch.Tensor) -> Any:
    return pickle.loads(payload.numpy().data)


def _named(params: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        items = [item if isinstance(item, tuple) else (None, item) for item in params]
        pairs = [(str(i) if name is None else name, p) for i, (name, p) in enumerate(items)]
    else:
        raise ValueError(
            "params must be a state_dict, named parameters or parameters, not "
            f"{type(params).__name__}"
        )
    wrong = [name for name, value in pairs if not isinstance(value, torch.Tensor)]
    if wrong:
        raise ValueError(
            f"these are no tensors: {', '.join(map(str, wrong))}; leave them out, and use "
            "broadcast_object for them"
        )
    return pairs


def _difference(mine: list[Any], theirs: list[Any], rank: int, root: int) -> str:
    here, there = ({entry[0]: entry for entry in entries} for entries in (mine, theirs))
    for name in sorted(here.keys() | there.keys(), key=str):
        if here.get(name) != there.get(name):
            return (
                f"parameters of rank {rank} are not those of rank {root}: {name!r} is "
                f"{_describe(here.get(name))} here and {_describe(there.get(name))} there"
            )
    return f"parameters of rank {rank} are in another order than those of rank {root}"


def _describe(entry: Any) -> str:
    return "missing" if entry is None else f"{entry[2]}{list(entry[1])}"
