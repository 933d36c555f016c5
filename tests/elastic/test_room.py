"""Memory for a state that arrives."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch

from nbelastic.elastic import transfer
from nbelastic.elastic.parcel import Parcel, flatten, unflatten
from nbelastic.elastic.room import Room
from nbelastic.elastic.transfer import spread
from tests.support.world import StaticContext, run_ranks

MANY = 64 << 20


def resident() -> int:
    """Return how many bytes of this process are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc how much memory is in use")
def test_room_for_a_state_is_there_before_it_comes_and_goes_piece_by_piece() -> None:
    before = resident()
    room = Room.for_state(MANY)
    assert resident() - before > 0.9 * MANY
    kept, other = room.bytes[: MANY // 2], room.bytes[MANY // 2 :]
    kept.fill_(7)
    room.give_back(other)
    assert resident() - before < 0.7 * MANY
    assert kept.min() == kept.max() == 7  # without memory for it, which malloc might keep
    del room, other
    assert kept.min() == kept.max() == 7  # without memory for it, which malloc might keep
    del kept
    assert resident() - before < 0.2 * MANY


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_a_fork_writes_to_it_does_not_show() -> None:
    room = Room(5000)
    room.bytes.fill_(1)
    child = multiprocessing.get_context("fork").Process(target=room.bytes.numpy().fill, args=(2,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert (room.bytes == 1).all()


def test_less_than_a_page_stays() -> None:
    room = Room(100)
    room.bytes.fill_(3)
    room.give_back(room.bytes[10:20])
    assert (room.bytes == 3).all()


@pytest.mark.parametrize("chunk", [1, 64, 100, 10_000])
def test_pieces_become_chunks_and_the_same_parcel_again(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", chunk)
    tensors = [torch.arange(3), torch.zeros(0), torch.randn(70), torch.tensor(2.5)]
    length, lengths, pieces = flatten(Parcel(b"head", tensors))
    chunks = [torch.cat(parts) for parts in transfer._chunks(pieces, sum(lengths))]
    assert {len(each) for each in chunks[:-1]} <= {chunk}
    parcel = unflatten(torch.cat(chunks), length)
    assert parcel.head == b"head"
    assert all(map(torch.equal, parcel.tensors, tensors))
    assert all(
        tensor.storage_offset() * tensor.element_size() % 64 == 0 for tensor in parcel.tensors
    )


@pytest.mark.parametrize("nbytes", [1, 1 << 20])
def test_a_parcel_arrives_in_the_room_that_was_made_if_it_is_large_enough(nbytes: int) -> None:
    def main(context: StaticContext) -> bool:
        room = Room(nbytes)
        mine = [torch.ones(5000), torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor(True)]
        parcel = Parcel(b"", mine) if context.rank == 0 else None
        found = spread(context.communicator(), [0, 1], parcel, room)
        assert torch.equal(found.tensors[0], torch.ones(5000))
        if context.rank == 1:  # pickled alone, it does not take the others along
            assert all(each.untyped_storage().nbytes() == each.nbytes for each in found.tensors)
        return found.room is room

    assert run_ranks(2, main) == [False, nbytes > 5000]
