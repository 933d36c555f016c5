"""Memory for a state that arrives."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch

from nbelastic.elastic.state import transfer
from nbelastic.elastic.state.state_payload import ReceiveBuffer, StatePayload, flatten, unflatten
from nbelastic.elastic.state.transfer import spread
from tests.support.world import StaticContext, run_ranks

MANY = 64 << 20


def resident() -> int:
    """Return how many bytes of this process are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc how much memory is in use")
def test_a_buffer_has_its_pages_and_returns_them_by_tensor() -> None:
    before = resident()
    buffer = ReceiveBuffer.for_state(MANY)
    assert resident() - before > 0.9 * MANY
    kept, other = buffer.bytes[: MANY // 2], buffer.bytes[MANY // 2 :]
    kept.fill_(7)
    buffer.give_back(other)
    assert resident() - before < 0.7 * MANY
    assert kept.min() == kept.max() == 7  # without memory for it, which malloc might keep
    del buffer, other
    assert kept.min() == kept.max() == 7  # without memory for it, which malloc might keep
    del kept
    assert resident() - before < 0.2 * MANY


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_a_fork_writes_to_it_does_not_show() -> None:
    buffer = ReceiveBuffer(5000)
    buffer.bytes.fill_(1)
    child = multiprocessing.get_context("fork").Process(target=buffer.bytes.numpy().fill, args=(2,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert (buffer.bytes == 1).all()


def test_less_than_a_page_stays() -> None:
    buffer = ReceiveBuffer(100)
    buffer.bytes.fill_(3)
    buffer.give_back(buffer.bytes[10:20])
    assert (buffer.bytes == 3).all()


@pytest.mark.parametrize("chunk", [1, 64, 100, 10_000])
def test_pieces_become_chunks_and_the_same_parcel_again(chunk: int) -> None:
    tensors = [torch.arange(3), torch.zeros(0), torch.randn(70), torch.tensor(2.5)]
    length, lengths, pieces = flatten(StatePayload(b"head", tensors))
    chunks = [torch.cat(parts) for parts in transfer._chunks(pieces, sum(lengths), chunk)]
    assert {len(each) for each in chunks[:-1]} <= {chunk}
    payload = unflatten(torch.cat(chunks), length)
    assert payload.head == b"head"
    assert all(map(torch.equal, payload.tensors, tensors))
    assert all(
        tensor.storage_offset() * tensor.element_size() % 64 == 0 for tensor in payload.tensors
    )


@pytest.mark.parametrize("nbytes", [1, 1 << 20])
def test_a_payload_is_received_in_a_buffer_that_is_large_enough(nbytes: int) -> None:
    def main(context: StaticContext) -> bool:
        buffer = ReceiveBuffer(nbytes)
        mine = [torch.ones(5000), torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor(True)]
        payload = StatePayload(b"", mine) if context.rank == 0 else None
        found = spread(context.communicator(), [0, 1], payload, buffer)
        assert torch.equal(found.tensors[0], torch.ones(5000))
        if context.rank == 1:  # pickled alone, it does not take the others along
            assert all(each.untyped_storage().nbytes() == each.nbytes for each in found.tensors)
        return found.buffer is buffer

    assert run_ranks(2, main) == [False, nbytes > 5000]
