import math
import mmap
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbelastic.collectives import Capabilities
from nbelastic.elastic.state import transfer
from nbelastic.elastic.state.state_payload import ReceiveBuffer, StatePayload, flatten
from nbelastic.elastic.state.transfer import allgather_object, spread, spread_everywhere, tree
from nbelastic.errors import CollectiveError
from tests.collectives.worlds import KINDS, MAKERS
from tests.support.world import run_ranks


@given(st.permutations(range(17)), st.integers(1, 17))
def test_a_tree_reaches_all_members_in_logarithmic_depth(ranks, count):
    members = ranks[:count]
    depth = {members[0]: 0}
    queue = [members[0]]
    while queue:
        rank = queue.pop(0)
        for child in tree(members, rank)[1]:
            assert child not in depth
            assert tree(members, child)[0] == rank
            depth[child] = depth[rank] + 1
            queue.append(child)
    assert sorted(depth) == sorted(members)
    assert tree(members, members[0])[0] is None
    assert max(depth.values()) <= math.ceil(math.log2(count)) if count > 1 else True


def send_some(context, members, spread):
    """Send some tensors to members, and return what has come, which must be equal."""
    sent = [torch.arange(1000.0), torch.zeros(0, 2), torch.tensor(1.5), torch.ones(3, 3).t()]
    payload = StatePayload(b"head", [*map(torch.clone, sent)])
    found = spread(context.communicator(), members, payload if context.rank == members[0] else None)
    assert (found is not None) == (context.rank in members)
    if found is not None:
        assert found.head == b"head"
        for came, expected in zip(found.tensors, sent, strict=True):
            assert came.dtype == expected.dtype and torch.equal(came, expected)
    return found


@pytest.mark.parametrize("chunk", [16, 48, 1000, 8 << 20])
@pytest.mark.parametrize("members", [[0, 1], [2, 0, 4], [4, 3, 2, 1, 0]])
def test_a_parcel_arrives_whole_at_members_and_nobody_else_takes_part(chunk, members, monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK_BYTES", chunk)

    def main(context):
        if context.rank not in members:
            assert context.communicator().completed == 0
            return
        found = send_some(context, members, spread)
        assert context.rank == members[0] or all(t.data_ptr() % 64 == 0 for t in found.tensors)

    run_ranks(5, main)


def test_memory_is_copied_for_a_communicator_that_keeps_it(monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1000)
    lent = []
    under_way = []

    def send(parts, to):
        lent.extend(parts)
        assert parts[0].data_ptr() not in under_way
        under_way.append(parts[0].data_ptr())
        return SimpleNamespace(wait=lambda: under_way.pop(0))

    keeps = Capabilities(stops_sending_on_failure=False)
    spy = SimpleNamespace(rank=0, capabilities=keeps, send_parts_async=send)
    mine = [torch.ones(1000), torch.ones(1000, dtype=torch.uint8)]
    spread(spy, [0, 1], StatePayload(b"x" * 1000, mine))
    assert sum(len(each) for each in lent) > 5000
    memory = {each.untyped_storage().data_ptr() for each in mine}
    assert not any(each.untyped_storage().data_ptr() in memory for each in lent)


@pytest.mark.parametrize("sizes", [(0, 1, 2), (10, 2000, 0), (5000, 5000, 100_000)])
def test_objects_of_any_size_are_gathered(sizes):
    def main(context):
        mine = {"rank": context.rank, "data": b"x" * sizes[context.rank]}
        found = allgather_object(context.communicator(), mine)
        rounds = context.communicator().completed
        return [(each["rank"], len(each["data"])) for each in found], rounds

    expected = list(enumerate(sizes)), 1 if max(sizes) < 500 else 2
    assert run_ranks(3, main) == [expected] * 3


DEVICES = [each for each in KINDS if each.values[0] in ("cuda_ipc", "nccl")]


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize(
    ("chunk", "full"), [(1000, False), (1 << 20, False), (1000, True)], ids=str
)
@pytest.mark.parametrize("members", [[0, 1], [2, 0], [1, 2, 0]])
def test_tensors_of_devices_travel_through_the_host_only_if_a_rank_lacks_memory(
    kind, chunk, full, members, monkeypatch
):
    through_host = []
    lacks = iter([full])

    def flattened(payload):
        through_host.append(sum(map(torch.numel, payload.tensors)))
        return flatten(payload)

    def empty(shape, dtype, device):
        if next(lacks, False):
            raise torch.OutOfMemoryError("the device is full")
        return torch.empty(shape, dtype=dtype, device=device)

    monkeypatch.setattr(transfer, "DEVICE_CHUNK_BYTES", chunk)
    monkeypatch.setattr(transfer, "flatten", flattened)
    monkeypatch.setattr(transfer, "_empty", empty)
    run_ranks(3, lambda c: send_some(c, members, spread_everywhere), make=MAKERS[kind])
    assert through_host == ([0, 1010] if full else [0])


@pytest.mark.parametrize("kind", DEVICES)
def test_a_peer_that_fails_while_devices_send_frees_all(kind, monkeypatch):
    monkeypatch.setattr(transfer, "DEVICE_CHUNK_BYTES", 1000)

    def main(context):
        if context.rank == 2:  # it needs nothing, and takes part
            broadcast = context.communicator().broadcast

            def fail(tensor, root):
                broadcast(tensor, root)
                context.communicator().abort("gone")

            context.communicator().broadcast = fail  # type: ignore[method-assign]
        with pytest.raises(CollectiveError):
            send_some(context, [0, 1], spread_everywhere)

    run_ranks(3, main, make=MAKERS[kind])


# -- memory for a state that arrives ---------------------------------------------------------------

MANY = 64 << 20


def resident():
    """Return how many bytes of this process are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc how much memory is in use")
def test_a_buffer_has_its_pages_and_returns_them_by_tensor():
    before = resident()
    buffer = ReceiveBuffer.for_state(MANY)
    assert resident() - before > 0.9 * MANY
    kept, other = buffer.bytes[: MANY // 2 + 10], buffer.bytes[MANY // 2 + 10 :]
    kept.fill_(7)
    buffer.give_back(other)
    buffer.give_back(kept[10:20])  # less than a page stays
    assert resident() - before < 0.7 * MANY
    del buffer, other
    assert kept.min() == kept.max() == 7  # without memory for it, which malloc might keep
    del kept
    assert resident() - before < 0.2 * MANY


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_a_fork_writes_to_it_does_not_show():
    buffer = ReceiveBuffer(5000)
    buffer.bytes.fill_(1)
    child = multiprocessing.get_context("fork").Process(target=buffer.bytes.numpy().fill, args=(2,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert (buffer.bytes == 1).all()


@pytest.mark.parametrize("nbytes", [1, 1 << 20])
def test_a_payload_is_received_in_a_buffer_that_is_large_enough(nbytes):
    def main(context):
        buffer = ReceiveBuffer(nbytes)
        mine = [torch.ones(5000), torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor(True)]
        payload = StatePayload(b"", mine) if context.rank == 0 else None
        found = spread(context.communicator(), [0, 1], payload, buffer)
        assert torch.equal(found.tensors[0], torch.ones(5000))
        if context.rank == 1:  # pickled alone, it does not take the others along
            assert all(each.untyped_storage().nbytes() == each.nbytes for each in found.tensors)
        return found.buffer is buffer

    assert run_ranks(2, main) == [False, nbytes > 5000]
