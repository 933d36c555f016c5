import functools
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
    ("inside", "names"),
    [((1,), FLOATS + WHOLE), ((0, 1, 2), ["bfloat16"]), ((), ["float32"])],
    ids=["mixed", "in", "out"],
)
def test_reductions_have_the_bits_of_adding_in_rank_order(groups, inside, names):
    for name, count, op in itertools.product(names, COUNTS, core.OPS):
        dtype = getattr(torch, name)
        if op == "average" and name in WHOLE:
            continue
        codes = core.TYPES[name], core.OPS[op]
        parts = [values(rank, count, dtype) for rank in range(RANKS)]
        wanted = bits(expected(op, parts))
        for rank in inside:
            parts[rank] = tensor_in(groups[rank], count, dtype).copy_(parts[rank])
        places = [(part.data_ptr(), count) for part in parts]
        on_all(groups, lambda rank, its, at=places, how=codes: its.allreduce(*at[rank], *how))
        assert [bits(part) for part in parts] == [wanted] * RANKS, (name, count, op)


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


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_all_kinds_of_processors_come_to_the_same_bits(isa):
    """As here with the best loops for this processor."""
    laws = ["tests/native/test_core.py", "tests/collectives/test_tree.py"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-k", "bits_of or any_sums and shm-2", *laws],
        env={**os.environ, "NBELASTIC_ISA": isa},
        cwd=Path(__file__).parents[2],
        check=True,
        timeout=120,
    )


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


@pytest.mark.parametrize(
    ("leaves", "nodes", "order"),
    [([2], [1, 1], [0]), ([2], [2], [0, 2]), ([2], [2], [0]), ([0], [0], []), ([9], [1], [1])],
)
def test_a_shape_that_is_no_tree_is_refused(leaves, nodes, order):
    with pytest.raises(ValueError, match=r"."):
        core.Tree(leaves, nodes, order)


@pytest.mark.parametrize("far", [False, True])
def test_bytes_arrive_wherever_source_and_target_begin(far):
    room = 3 * 4096
    source = torch.randint(0, 256, (room,), dtype=torch.uint8)
    lengths = (0, 1, 63, 64, 65, 2048, 2049, 2112, 4099, 8191)
    ahead = (*range(70), 127, 128, 4000, 4033)
    for begin, length, more in itertools.product((0, 5, 64), lengths, ahead):
        target = torch.full((room,), 7, dtype=torch.uint8)
        at = (source.data_ptr() + begin + more - target.data_ptr()) % 4096
        wanted = target.clone()
        wanted[at : at + length] = source[begin : begin + length]
        core.copy(target.data_ptr() + at, source.data_ptr() + begin, length, far)
        assert torch.equal(target, wanted)


def test_messages_arrive_wherever_in_the_ring_they_begin(groups):
    sent = torch.randint(0, 256, (400_001,), dtype=torch.uint8)
    for skipped in range(40):
        parts = [(sent.data_ptr(), skipped), (sent.data_ptr() + skipped, len(sent) - skipped)]
        got = torch.zeros_like(sent)
        with ThreadPoolExecutor(1) as sender:
            sending = sender.submit(groups[0].send, parts, 1)
            groups[1].receive(got.data_ptr(), len(got), 0)
            sending.result(30)
        assert torch.equal(got, sent)
