"""Broadcasts of parameters, optimizer state and objects from one rank to all."""

from __future__ import annotations

import collections
import itertools
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nbelastic.elastic.ranks.context import current
from nbelastic.elastic.training_checks import watch
from nbelastic.pickling import dumps
from nbelastic.torch.ops.coordination.comparison import agree, begin
from nbelastic.torch.ops.coordination.process_sets import group_of
from nbelastic.torch.ops.operation.fusion import plan
from nbelastic.torch.ops.operation.tensor_operations import (
    Allgather,
    Broadcast,
    Numbers,
    Pending,
    TensorOperation,
    called,
    check_root,
    kind_of,
)

if TYPE_CHECKING:
    from nbelastic.collectives import Communicator, Handle
    from nbelastic.elastic.ranks.groups import Group

T = TypeVar("T")

IN_FLIGHT = 2  # one travels while the next is copied


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
        The rank that has the values.
    process_set : ProcessSet, optional
        The ranks that take part; by default all.

    Raises
    ------
    CollectiveError
        A peer is gone, or the generation is over.
    RanksDisagree
        Names, shapes or types are not the same on all ranks.
    ValueError
        A value is no tensor, or `root_rank` no rank.
    """
    group = group_of(process_set)
    named = _named(params)
    communicator = group.communicator()
    if communicator.size == 1:
        return
    root = check_root(root_rank, group.ranks)
    what = [f"{name!r} is {kind_of(it.dtype, it.shape)}" for name, it in named]
    text = "\n".join([f"broadcast_parameters from rank {root_rank}", *what])
    agree(communicator, text, what="broadcast_parameters" if group.is_global else None)
    tensors = [tensor for _, tensor in named]
    _broadcast(communicator, tensors, root)
    if group.is_global:
        watch(current(), named)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: object = None,
) -> None:
    """Make an optimizer's state and options those of rank `root_rank`.

    Nothing is stepped to create state, so parameters stay what they are, and a root without state
    leaves the others without. Where no state exists, parameters without a gradient get zeros as
    gradients, as in Horovod.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Over the same parameters on all ranks.
    root_rank : int, default 0
        The rank that has the state.
    model : torch.nn.Module, optional
        Tells which parameters have sparse gradients; they get sparse zeros.
    process_set : ProcessSet, optional
        The ranks that take part; by default all.

    Raises
    ------
    CollectiveError
        A peer is gone, or the generation is over; the optimizer is as it was.
    RanksDisagree
        The optimizers are of different classes, or their groups have other parameters.
    """
    group = group_of(process_set)
    communicator = group.communicator()
    if not optimizer.state:
        _give_zeros(optimizer, model)
    if communicator.size == 1:
        return
    root = check_root(root_rank, group.ranks)
    verb = f"broadcast_optimizer_state of {type(optimizer).__name__} from rank {root_rank}"
    groups = [options["params"] for options in optimizer.param_groups]
    counts = ", ".join(str(len(parameters)) for parameters in groups)
    parameters = enumerate(itertools.chain(*groups))
    what = [f"parameter {index} is {kind_of(it.dtype, it.shape)}" for index, it in parameters]
    text = "\n".join([verb, f"an optimizer with groups of {counts} parameters", *what])
    agree(communicator, text, what="broadcast_optimizer_state" if group.is_global else None)
    is_root = communicator.rank == root
    state: Any = optimizer.state_dict() if is_root else None
    # Without values, which travel apart, each in memory of its own.
    skeleton = _mapped(state, lambda tensor: tensor.to("meta"))
    skeleton = begin(group, _ObjectBroadcast(skeleton, root, verb, group)).wait()
    if not is_root:
        # On the host, because load_state_dict() copies to the devices of the parameters.
        state = _mapped(skeleton, lambda tensor: torch.empty_like(tensor, device="cpu"))
    tensors: list[torch.Tensor] = []
    _mapped(state, tensors.append)
    _broadcast(communicator, tensors, root)
    if not is_root:
        optimizer.load_state_dict(state)  # only now: after a failure it is as it was


def _give_zeros(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Give parameters without a gradient zeros, which scripts of Horovod's read."""
    modules = [] if model is None else [m for m in model.modules() if getattr(m, "sparse", False)]
    sparse = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    only_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for parameter in itertools.chain(*(options["params"] for options in optimizer.param_groups)):
        if parameter.requires_grad and parameter.grad is None:
            zeros = torch.zeros_like(parameter, requires_grad=False)
            is_sparse = only_sparse or id(parameter) in sparse
            parameter.grad = zeros.to_sparse(1) if is_sparse else zeros


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: object = None
) -> T:
    """Return the `obj` of rank `root_rank`: itself there, a copy elsewhere.

    Parameters
    ----------
    obj : object
        On the root: anything that cloudpickle can pickle. Elsewhere not used.
    root_rank : int, default 0
        The rank that has the object.
    name : str, optional
        Equal on all ranks; named in errors.
    process_set : ProcessSet, optional
        The ranks that take part; by default all.

    Raises
    ------
    CollectiveError
        A peer is gone, or the generation is over.
    RanksDisagree
        Ranks called different operations, or with other roots.
    ValueError
        `root_rank` is no rank.
    """
    group = group_of(process_set)
    root = check_root(root_rank, group.ranks)
    group.check_member()
    if group.size == 1:
        return obj
    verb = f"{called('broadcast_object', name)} from rank {root_rank}"
    received: T = begin(group, _ObjectBroadcast(obj, root, verb, group), name).wait()
    return received


def allgather_object(obj: T, name: str | None = None, process_set: object = None) -> list[T]:
    """Return the `obj` of every rank, in the order of the ranks; this rank's is `obj` itself.

    Raises
    ------
    CollectiveError
        A peer is gone, or the generation is over.
    """
    group = group_of(process_set)
    group.check_member()
    if group.size == 1:
        return [obj]
    gather = Allgather([_encode(obj)])
    gather.verb, gather.pattern = "allgather_object", called("allgather_object", name)
    (gathered,) = begin(group, gather, name).wait()
    (lengths,) = gather.lengths
    payloads = enumerate(torch.split(gathered, lengths))
    return [obj if rank == gather.rank else _decode(each) for rank, each in payloads]


class _ObjectBroadcast(TensorOperation[Any]):
    """Broadcast of a pickled object whose length only the root knows."""

    verb = "broadcast_object"

    def __init__(self, obj: object, root: int, text: str, group: Group) -> None:
        self._obj, self._root, self.pattern = obj, root, text
        self._is_root = group.ranks[root] == group.context.rank
        self._payload = _encode(obj) if self._is_root else torch.empty(0, dtype=torch.uint8)
        self.numbers = (self._payload.numel(),)

    def launch(self, communicator: Communicator, numbers: Numbers) -> Sequence[Handle]:
        if not self._is_root:
            self._payload = torch.empty(numbers[self._root][0], dtype=torch.uint8)
        return [communicator.broadcast_async(self._payload, self._root)]

    def store(self) -> Any:
        return self._obj if self._is_root else _decode(self._payload)


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return nested containers with each of their tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(part, change) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(part, change) for part in value)
    return value


def _broadcast(communicator: Communicator, tensors: Sequence[torch.Tensor], root: int) -> None:
    """Broadcast in place with at most two chunks in addition to the tensors themselves."""
    waiting: collections.deque[Pending[Any]] = collections.deque()
    for indices in plan(tensors):
        if len(waiting) == IN_FLIGHT:
            waiting.popleft().wait()
        some = [tensors[index] for index in indices]
        copies = Broadcast(some, some, root)
        copies.load_on(communicator.rank, communicator.size)
        waiting.append(Pending(copies.launch(communicator, ()), copies.store))
    while waiting:
        waiting.popleft().wait()


def _encode(obj: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(dumps(obj)), dtype=torch.uint8)  # torch warns if read-only


def _decode(payload: torch.Tensor) -> Any:
    return pickle.loads(payload.numpy().data)


def _named(params: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        pairs = sorted(params.items())  # a state dict's order may differ by rank
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        pairs = [it if isinstance(it, tuple) else (str(i), it) for i, it in enumerate(params)]
    else:
        raise ValueError(
            "params must be a state_dict, named parameters or parameters, not "
            f"{type(params).__name__}"
        )
    wrong = [name for name, value in pairs if not isinstance(value, torch.Tensor)]
    if wrong:
        raise ValueError(
            f"these are no tensors: {', '.join(map(str, wrong))}; leave them out and use "
            "broadcast_object for them"
        )
    return pairs
