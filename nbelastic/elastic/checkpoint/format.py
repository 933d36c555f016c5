"""Layout of a checkpoint file: safetensors, with a checksum as its last tensor.

::

    length of the header (8 bytes) · header (JSON) · bytes of all tensors

The header has the type, shape and offsets of each tensor under its name, and strings under
``__metadata__``. Offsets leave no gap. The last tensor is a digest of all bytes before it.

A file is a complete checkpoint if, and only if, its length and its checksum are right.

Each tensor has the name by which the state knows it, so that any reader of safetensors finds it.
All else is one pickle, stored as a tensor of bytes. It also has what safetensors cannot express:
the order of the tensors, their devices, and types without a name of their own.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbelastic.elastic.state.state_payload import StatePayload
from nbelastic.errors import NbelasticError

FORMAT = 8
CHECKSUM = "nbelastic.checksum"  # name of the tensor that holds the digest
PICKLE = "nbelastic.pickle"  # name of the tensor that holds all values but tensors

_NAMES = {
    **{"bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}
"""Types that every reader of safetensors knows; tensors of others are stored as bytes."""

_NUMBERS = ("loop", "generation", "version", "size")
_FORMAT_KEY = "nbelastic"
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 100_000_000  # bytes; readers of safetensors refuse a longer one
_ALIGNMENT = 8
_DIGEST_BYTES = 16
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Header:
    """Properties of the commit in a file."""

    job: str
    loop: int
    generation: int
    version: int  # of the commit
    size: int  # number of ranks

    @property
    def file(self) -> str:
        """Name of the file."""
        return f"{self.loop:02d}-{self.generation:06d}-{self.version:010d}.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """Tensor of a file: its type by the name in safetensors, its shape, and its bytes."""

    dtype: str
    shape: Sequence[int]
    data: memoryview


Checkpoint = tuple[Header, dict[str, StoredTensor]]
"""Contents of a file: the commit, and all tensors but the checksum, by name."""


def _printable(text: str) -> str:
    """Return a text that any JSON reader accepts, without lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def encode(header: Header, tensors: dict[str, StoredTensor]) -> Iterator[memoryview]:
    """Yield a file's contents, a few megabytes at most at a time."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for piece in itertools.chain([_head(header, tensors)], (t.data for t in tensors.values())):
        for at in range(0, len(piece), _CHUNK_BYTES):
            chunk = piece[at : at + _CHUNK_BYTES]
            digest.update(chunk)
            yield chunk
    yield memoryview(digest.digest())


def _head(header: Header, tensors: dict[str, StoredTensor]) -> memoryview:
    numbers = {name: str(getattr(header, name)) for name in _NUMBERS}
    about = {"format": "pt", _FORMAT_KEY: str(FORMAT), "job": _printable(header.job), **numbers}
    index: dict[str, Any] = {_METADATA: about}  # safetensors has strings only
    checksum = StoredTensor("U8", [_DIGEST_BYTES], memoryview(bytes(_DIGEST_BYTES)))
    start = 0
    for name, tensor in (*tensors.items(), (CHECKSUM, checksum)):
        offsets = [start, start := start + len(tensor.data)]
        index[name] = {"dtype": tensor.dtype, "shape": [*tensor.shape], "data_offsets": offsets}
    text = json.dumps(index, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _LONGEST_HEADER:
        raise NbelasticError(f"a checkpoint cannot describe {len(tensors):,} tensors")
    return memoryview(_LENGTH.pack(len(text)) + text)


def decode(file: Any, size: int, on_progress: Callable[[], None]) -> Checkpoint | None:
    """Read a file of `size` bytes; None if it is not complete."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    left = size - _LENGTH.size - _DIGEST_BYTES
    try:
        (length,) = _LENGTH.unpack(_take(file, _LENGTH.size, digest))
        if length > min(left, _LONGEST_HEADER):
            return None
        index = json.loads(_take(file, length, digest))
        # No checksum is known yet, and to read other bytes may take more memory than there is.
        if index[CHECKSUM]["data_offsets"] != [left - length, left - length + _DIGEST_BYTES]:
            return None
        data = memoryview(_take(file, left - length, digest, on_progress))
    except (EOFError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if file.read(_DIGEST_BYTES + 1) != digest.digest():
        return None
    fields = index.pop(_METADATA)
    if fields[_FORMAT_KEY] != str(FORMAT):
        raise NbelasticError(
            f"it has format {fields[_FORMAT_KEY]}; this version of nbelastic reads {FORMAT}"
        )
    del index[CHECKSUM]
    tensors = {
        name: StoredTensor(each["dtype"], each["shape"], data[slice(*each["data_offsets"])])
        for name, each in index.items()
    }
    return Header(fields["job"], **{name: int(fields[name]) for name in _NUMBERS}), tensors


def _take(
    file: Any, length: int, digest: Any, on_progress: Callable[[], None] = lambda: None
) -> bytearray:
    """Read exactly `length` bytes."""
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = file.readinto(view[:_CHUNK_BYTES])
        if not count:
            raise EOFError
        digest.update(view[:count])
        view = view[count:]
        on_progress()
    return data


def stored(payload: StatePayload, more: object) -> dict[str, StoredTensor]:
    """Return copies of a payload's tensors, and all else of it, in the order of the file."""
    import torch

    names = _distinct(payload.names)
    kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in payload.tensors]
    rest = pickle.dumps((more, payload.head, [*zip(names, kinds, payload.devices, strict=True)]))
    # No gap is allowed, so the largest elements come first: then all of them are aligned.
    pairs = zip(names, payload.tensors, strict=True)
    found = {}
    for name, tensor in sorted(pairs, key=lambda pair: -pair[1].element_size()):
        # Contiguous, and without a conjugate bit: to() does neither.
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
        data = copied.view(-1).view(torch.uint8).numpy().data
        kind = _NAMES.get(str(tensor.dtype).removeprefix("torch."))
        shape = copied.shape if kind else [len(data)]
        found[name] = StoredTensor(kind or "U8", shape, data)
    found[PICKLE] = StoredTensor("U8", [len(rest)], memoryview(rest))
    return found


def unstored(tensors: dict[str, StoredTensor]) -> tuple[StatePayload, Any]:
    """Return the arguments of :func:`stored`. Tensors keep the memory of the read."""
    import torch

    more, head, described = pickle.loads(tensors[PICKLE].data)
    values = []
    for name, (shape, dtype), _ in described:
        data = tensors[name].data  # a storage for each, because pickling takes whole storages
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        values.append(flat.view(shape))
    return StatePayload(head, values, [device for *_, device in described]), more


def _distinct(names: Iterable[str]) -> list[str]:
    """Return names that JSON can have, no two the same."""
    found = dict.fromkeys([PICKLE, CHECKSUM, _METADATA])
    for name in map(_printable, names):
        unique, number = name, 1
        while unique in found:
            number += 1
            unique = f"{name}.{number}"
        found[unique] = None
    return [*found][3:]
