"""Tensors and pickled values of a commit, as a checkpoint file holds them.

Each tensor has the name by which the state knows it, so that any reader of safetensors finds it.
All else is one pickle, stored as a tensor of bytes. It also has what safetensors cannot express:
the order of the tensors, their devices, and types without a name of their own.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from nbelastic.elastic.checkpoint.format import CHECKSUM, StoredTensor, printable
from nbelastic.elastic.state.state_payload import StatePayload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

PICKLE = "nbelastic.pickle"
"""Name of the tensor that holds all values but tensors."""

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
"""Types that every reader of safetensors knows; tensors of others are stored as bytes."""


def stored(payload: StatePayload, more: object) -> dict[str, StoredTensor]:
    """Return copies of a payload's tensors, and all else of it, in the order of the file.

    `more` is a further value to pickle.
    """
    names = _distinct(payload.names or [f"tensor.{n}" for n in range(len(payload.tensors))])
    devices = payload.devices or [tensor.device.type for tensor in payload.tensors]
    kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in payload.tensors]
    rest = pickle.dumps((more, payload.head, [*zip(names, kinds, devices, strict=True)]))
    # No gap is allowed, so the largest elements come first: then all of them are aligned.
    pairs = zip(names, payload.tensors, strict=True)
    ordered = sorted(pairs, key=lambda pair: -pair[1].element_size())
    found = {name: _stored(tensor) for name, tensor in ordered}
    found[PICKLE] = StoredTensor("U8", [len(rest)], memoryview(rest))
    return found


def unstored(tensors: dict[str, StoredTensor]) -> tuple[StatePayload, Any]:
    """Return what :func:`stored` was given. Tensors use the memory that they were read into."""
    more, head, described = pickle.loads(tensors[PICKLE].data)
    names, kinds, devices = zip(*described, strict=True) if described else ((), (), ())
    values = [
        _tensor(tensors[name].data, shape, dtype)
        for name, (shape, dtype) in zip(names, kinds, strict=True)
    ]
    return StatePayload(head, values, devices, names=names), more


def _stored(tensor: torch.Tensor) -> StoredTensor:
    import torch

    name = _NAMES.get(str(tensor.dtype).removeprefix("torch."))
    # Contiguous, and without a conjugate bit: to() does neither.
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
    data = copied.view(-1).view(torch.uint8).numpy().data if copied.numel() else memoryview(b"")
    return (
        StoredTensor("U8", [len(data)], data)
        if name is None
        else StoredTensor(name, copied.shape, data)
    )


def _tensor(data: memoryview, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor with a storage of its own, because pickling takes whole storages."""
    import torch

    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).view(
        shape
    )


def _distinct(names: Iterable[str]) -> list[str]:
    """Return names that JSON can have, no two the same."""
    found = dict.fromkeys([PICKLE, CHECKSUM, "__metadata__"])
    for name in map(printable, names):
        unique, number = name, 1
        while unique in found:
            number += 1
            unique = f"{name}.{number}"
        found[unique] = None
    return [*found][3:]
