"""What a checkpoint's file looks like.

::

    magic · length of the header · header (JSON) · payload · checksum over all before it

A file is a complete checkpoint if, and only if, its length and its checksum are right.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import struct
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from nbelastic.errors import NbelasticError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Header", "decode", "encode"]

FORMAT = 2
_MAGIC = b"NBELAST\n"
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 16
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a file says of itself.

    Attributes
    ----------
    job : str
        Name of the job.
    loop, generation, version : int
        Which elastic loop, and which commit of which generation.
    size : int
        Number of ranks.
    index : int
        Bytes of the payload that describe the rest of it.
    payload : int
        Bytes of the payload.
    format : int
        Version of the format.
    """

    job: str
    loop: int
    generation: int
    version: int
    size: int
    index: int
    payload: int
    format: int = FORMAT

    @property
    def file(self) -> str:
        """Name of the file."""
        return f"{self.loop:02d}-{self.generation:06d}-{self.version:010d}.nbe"


def encode(header: Header, payload: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield a file's contents, a few megabytes at most at a time."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    text = json.dumps(dataclasses.asdict(header)).encode()
    start = memoryview(_MAGIC + _LENGTH.pack(len(text)) + text)
    for piece in itertools.chain([start], payload):
        for at in range(0, len(piece), _CHUNK_BYTES):
            chunk = piece[at : at + _CHUNK_BYTES]
            digest.update(chunk)
            yield chunk
    yield memoryview(digest.digest())


def decode(
    file: IO[bytes], size: int, moving: Callable[[], None]
) -> tuple[Header, bytearray] | None:
    """Read header and payload of a file of `size` bytes; None if it is not complete.

    `moving` is called every few megabytes.

    Raises
    ------
    NbelasticError
        It is complete, but of another format.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    left = size - len(_MAGIC) - _LENGTH.size - _DIGEST_BYTES
    try:
        start = _take(file, len(_MAGIC) + _LENGTH.size, digest)
        (length,) = _LENGTH.unpack(start[len(_MAGIC) :])
        if not start.startswith(_MAGIC) or length > left:
            return None
        text = _take(file, length, digest)
        payload = _take(file, left - length, digest, moving)
    except EOFError:
        return None
    if file.read(_DIGEST_BYTES + 1) != digest.digest():
        return None
    fields = json.loads(text)
    if fields["format"] != FORMAT:
        raise NbelasticError(
            f"it has format {fields['format']}; this version of nbelastic reads {FORMAT}"
        )
    return Header(**fields), payload


def _take(
    file: IO[bytes], length: int, digest: Any, moving: Callable[[], None] = lambda: None
) -> bytearray:
    """Read exactly `length` bytes."""
    if length < 0:
        raise EOFError
    data = bytearray(length)
    view = memoryview(data)
    filled = 0
    while filled < length:
        chunk = file.read(min(length - filled, _CHUNK_BYTES))
        if not chunk:
            raise EOFError
        view[filled : filled + len(chunk)] = chunk
        digest.update(chunk)
        filled += len(chunk)
        moving()
    return data
