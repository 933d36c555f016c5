from __future__ import annotations

import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbelastic.collectives import Capabilities
from nbelastic.elastic.state import transfer
from nbelastic.elastic.state.state_payload import StatePayload, flatten
from nbelastic.elastic.state.transfer import allgather_object, spread, spread_everywhere, tree
from nbelastic.errors import CollectiveError
from tests.collectives.worlds import KINDS, MAKERS
from tests.support.world import StaticContext, run_ranks


@given(st.permutations(range(17)), st.integers(1, 17))
def test_a_tree_reaches_all_members_in_logarithmic_depth(ranks: list[int], count: int) -> None:
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


@pytest.mark.parametrize("chunk", [16, 48, 1000, 8 << 20])
@pytest.mark.parametrize("members", [[0, 1], [2, 0, 4], [4, 3, 2, 1, 0]])
def test_a_parcel_arrives_whole_at_members_and_nobody_else_takes_part(
    chunk: int, members: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", chunk)
    tensors = [torch.arange(100), torch.zeros(0, 2), torch.tensor(1.5), torch.ones(3, 3).t()]
    expected = [tensor.clone() for tensor in tensors]

    def main(context: StaticContext) -> None:
        if context.rank not in members:
            assert context.communicator().completed == 0
            return
        payload = StatePayload(b"head", tensors) if context.rank == members[0] else None
        found = spread(context.communicator(), members, payload)
        assert found.head == b"head"
        assert all(
            a.dtype == b.dtype and torch.equal(a, b)
            for a, b in zip(found.tensors, expected, strict=True)
        )

    run_ranks(5, main)


def test_memory_is_copied_for_a_communicator_that_keeps_it() -> None:
    lent: list[torch.Tensor] = []

    class Done:
        def wait(self) -> None:
            pass

    class Spy:
        rank = 0
        capabilities = Capabilities(stops_sending_on_failure=False)

        def send_async(self, tensor: torch.Tensor, to: int) -> Done:
            lent.append(tensor)
            return Done()

    mine = [torch.ones(1000), torch.ones(1000, dtype=torch.uint8)]
    spread(Spy(), [0, 1], StatePayload(b"x" * 1000, mine))  # type: ignore[arg-type]
    assert sum(len(each) for each in lent) > 5000
    memory = {each.untyped_storage().data_ptr() for each in mine}
    assert not any(each.untyped_storage().data_ptr() in memory for each in lent)


def test_a_rank_without_a_parcel_cannot_send() -> None:
    with pytest.raises(ValueError, match="rank 0"):
        run_ranks(1, lambda context: spread(context.communicator(), [0]))


@pytest.mark.parametrize("sizes", [(0, 1, 2), (10, 2000, 0), (5000, 5000, 100_000)])
def test_objects_of_any_size_are_gathered(sizes: tuple[int, ...]) -> None:
    def main(context: StaticContext) -> object:
        mine = {"rank": context.rank, "data": b"x" * sizes[context.rank]}
        found = allgather_object(context.communicator(), mine)
        rounds = context.communicator().completed
        return [(each["rank"], len(each["data"])) for each in found], rounds

    expected = list(enumerate(sizes)), 1 if max(sizes) < 500 else 2
    assert run_ranks(3, main) == [expected] * 3


def test_a_peer_that_goes_away_frees_those_who_wait_for_it() -> None:
    freed = threading.Event()
    both = threading.Barrier(2)

    def main(context: StaticContext) -> None:
        communicator = context.communicator()
        both.wait(timeout=20)
        if context.rank == 0:
            communicator.abort("gone")
            assert freed.wait(20)
            return
        threading.Timer(0.1, communicator.abort, ["the generation is over"]).start()
        with pytest.raises(CollectiveError):
            spread(communicator, [0, 1])
        freed.set()

    run_ranks(2, main)


DEVICES = [each for each in KINDS if each.values[0] in ("cuda_ipc", "nccl", "cuda_ipc+nccl")]


def wait_for_all(context: StaticContext, members: list[int]) -> StatePayload | None:
    """Send some tensors of a fake device to members, and check what has come."""
    sent = [torch.arange(1000.0), torch.zeros(0, 2), torch.tensor(1.5), torch.ones(3, 3).t()]
    payload = StatePayload(b"head", sent) if context.rank == members[0] else None
    found = spread_everywhere(context.communicator(), members, payload)
    if context.rank not in members:
        assert found is None
    elif context.rank != members[0]:
        assert found is not None and found.head == b"head"
        for came, expected in zip(found.tensors, sent, strict=True):
            assert came.dtype == expected.dtype and torch.equal(came, expected)
    return found


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("chunk", [1000, 1 << 20])
@pytest.mark.parametrize("members", [[0, 1], [2, 0], [1, 2, 0]])
def test_tensors_of_devices_do_not_travel_through_the_host(
    kind: str, chunk: int, members: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "DEVICE_CHUNK_BYTES", chunk)
    through_host: list[int] = []
    monkeypatch.setattr(
        transfer,
        "flatten",
        lambda payload: (
            through_host.append(sum(map(torch.numel, payload.tensors))) or flatten(payload)
        ),
    )
    run_ranks(3, lambda context: wait_for_all(context, members), make=MAKERS[kind])
    assert through_host == [0]


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("members", [[0, 1], [0, 1, 2]])
def test_a_rank_without_memory_has_all_receive_through_the_host(
    kind: str, members: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = iter([True])

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        if next(full, False):
            raise torch.OutOfMemoryError("the device is full")
        return torch.empty(shape, dtype=dtype, device=device)

    monkeypatch.setattr(transfer, "_empty", empty)
    monkeypatch.setattr(transfer, "_broadcast_there", lambda *_: pytest.fail("it was broadcast"))
    run_ranks(3, lambda context: wait_for_all(context, members), make=MAKERS[kind])


@pytest.mark.parametrize("kind", DEVICES)
def test_a_peer_that_fails_while_devices_send_frees_all(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "DEVICE_CHUNK_BYTES", 1000)

    def main(context: StaticContext) -> None:
        if context.rank == 2:  # it needs nothing, and takes part
            broadcast = context.communicator().broadcast

            def fail(tensor: torch.Tensor, root: int) -> None:
                broadcast(tensor, root)
                context.communicator().abort("gone")

            context.communicator().broadcast = fail  # type: ignore[method-assign]
        with pytest.raises(CollectiveError):
            wait_for_all(context, [0, 1])

    run_ranks(3, main, make=MAKERS[kind])
