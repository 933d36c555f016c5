import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nbelastic.native import core
from tests.support.bits import bits

RANKS = 3
FLOATS = ("float32", "float64", "float16", "bfloat16")
WHOLE = ("int8", "int32", "int64", "uint8")
COUNTS = (1, 37, 3_000, 40_000, 600_001)


@pytest.fixture
def groups():
    fd = core.create(RANKS)
    groups = [core.Group(fd, rank, RANKS, 20.0) for rank in range(RANKS)]
    os.close(fd)
    yield groups
    for group in groups:
        group.close()


def on_all(groups, function):
    with ThreadPoolExecutor(len(groups)) as threads:
        futures = [threads.submit(function, rank, group) for rank, group in enumerate(groups)]
        return [future.result(30) for future in futures]


def tensor_in(group, count, dtype):
    return torch.from_dlpack(group.empty(count * dtype.itemsize)).view(dtype)


def values(rank, count, dtype):
    generator = torch.Generator().manual_seed(1000 * count + rank)
    if dtype.is_floating_point:
        found = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
        found[count // 2] = torch.nan if rank == 1 else 1.0  # what is not a number stays visible
        return found
    return torch.randint(0, 100, (count,), generator=generator).to(dtype)


COMBINE = {"product": torch.mul, "min": torch.minimum, "max": torch.maximum}


def expected(op, parts):
    """What adding in the order of ranks gives: 16-bit types in 32 bits, rounded once."""
    dtype = parts[0].dtype
    wide = [part.float() if dtype.itemsize == 2 else part for part in parts]
    total = functools.reduce(COMBINE.get(op, torch.add), wide)
    return (total / len(parts) if op == "average" else total).to(dtype)


@pytest.mark.parametrize(
    ("name", "inside"),
    [*((name, "mixed") for name in FLOATS + WHOLE), ("bfloat16", "in"), ("float32", "out")],
)
def test_reductions_have_the_bits_of_adding_in_rank_order(groups, name, inside):
    dtype = getattr(torch, name)
    for count in COUNTS if name in ("float32", "bfloat16") else COUNTS[:-1]:
        parts = [values(rank, count, dtype) for rank in range(RANKS)]
        for op, code in core.OPS.items():
            if op == "average" and name in WHOLE:
                continue

            def reduce(rank, group, code=code, parts=parts, count=count):
                own = parts[rank].clone()
                if inside == "in" or (inside == "mixed" and rank == 1):
                    own = tensor_in(group, count, dtype).copy_(own)
                group.allreduce(own.data_ptr(), count, core.TYPES[name], code)
                return own.clone()

            results = on_all(groups, reduce)
            for result in results:
                assert bits(result) == bits(expected(op, parts)), (count, op)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_value_comes_through_unchanged(name):
    fd = core.create(1)
    group = core.Group(fd, 0, 1, 5.0)
    os.close(fd)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(getattr(torch, name))
    for chunk in every.clone().split(8000):
        before = chunk.clone()
        group.allreduce(chunk.data_ptr(), chunk.numel(), core.TYPES[name], core.OPS["sum"])
        same = chunk.view(torch.int16) == before.view(torch.int16)
        assert (same | (before.isnan() & chunk.isnan())).all()
    group.close()


SAME_BITS = """
import ctypes, hashlib, random, struct
from nbelastic.native import core
fd = core.create(1)
group = core.Group(fd, 0, 1, 5.0)
digest = hashlib.sha256()
formats = {"float32": "f", "float64": "d", "float16": "e"}
formats |= {"int8": "b", "int32": "i", "int64": "q", "uint8": "B"}
def memory(name, seed):
    dice = random.Random(seed)
    whole = "int" in name
    values = [dice.randrange(100) if whole else dice.gauss(0, 1) for _ in range(3_001)]
    if name == "bfloat16":  # the upper halves of float32
        return bytearray(b"".join(struct.pack("<f", each)[2:] for each in values))
    return bytearray(struct.pack(f"<{len(values)}{formats[name]}", *values))
def address(block):
    return ctypes.addressof(ctypes.c_char.from_buffer(block))
for name in (*formats, "bfloat16"):
    for op, code in core.OPS.items():
        if op == "average" and "int" in name:
            continue
        own = memory(name, 0)
        group.allreduce(address(own), 3_001, core.TYPES[name], code)
        digest.update(own)
    nodes = [memory(name, each) for each in range(4)]
    places = [[(address(node), 3_001)] for node in nodes]
    tree = core.Tree([4], [4], [0, 1, 0, 2])
    group.wait(group.allreduce_tree_async(places, places[0], tree, core.TYPES[name]))
    digest.update(nodes[0])
print(core.ISA, digest.hexdigest())
group.close()
"""


@pytest.mark.slow
def test_all_kinds_of_processors_come_to_the_same_bits():
    told = {}
    for isa in ("baseline", "avx2", "avx512"):
        done = subprocess.run(
            [sys.executable, "-c", SAME_BITS],
            env={**os.environ, "NBELASTIC_ISA": isa},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        used, digest = done.stdout.split()
        told[used] = digest
    assert len(set(told.values())) == 1, told
    assert "baseline" in told or "neon" in told


def test_blocks_are_used_again_when_nothing_refers_to_them(groups):
    group = groups[0]
    first = tensor_in(group, 1000, torch.float32)
    address = first.data_ptr()
    view = first[10:20]
    del first
    assert tensor_in(group, 1000, torch.float32).data_ptr() != address
    del view
    assert address in {tensor_in(group, 1000, torch.float32).data_ptr() for _ in range(2)}


def test_a_file_that_is_no_segment_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\0" * 8192)
    with path.open("rb+") as file, pytest.raises(ValueError, match="not a segment"):
        core.Group(file.fileno(), 0, 2, 5.0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        core.Group(999_999, 0, 2, 5.0)


def test_nobody_can_shrink_a_segment_under_the_others():
    fd = core.create(2)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    os.close(fd)
