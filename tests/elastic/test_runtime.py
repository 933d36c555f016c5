"""When a rank looks for those it cannot reach, and what it says of them."""

import threading
from unittest.mock import Mock

import pytest
import torch

from nbelastic.collectives import RendezvousServer
from nbelastic.elastic import run
from nbelastic.elastic.ranks import runtime
from nbelastic.elastic.ranks.runtime import RankSpec, UnreachablePeers
from nbelastic.messages import Member, Place, Plan, RankReady, Slot
from nbelastic.torch.state.torch_state import TorchState
from tests.elastic.members import one_rank


def plan(*starts):
    members = (Member(s, Slot(f"w{s}", "", "", ""), (f"10.0.0.{s}", 1), 0) for s in starts)
    return Plan(generation=1, members=tuple(members), loop=1)


def test_all_others_are_asked_after_a_second_failure_in_a_row():
    asked = []

    def probe(addresses):
        asked.append([host for host, _ in addresses])
        return [len(addresses) - 1]

    peers, met = UnreachablePeers(probe), plan(3, 5, 7)
    for _ in range(2):
        peers.record_exits(met, (2, 0))
        peers.record_failure(met, 5)
        assert (asked, peers.unreached, peers.gone) == ([], (), (7, 3)), "one is bad luck"
        peers.record_failure(met, 5)
        assert (asked.pop(), peers.unreached) == (["10.0.0.3", "10.0.0.7"], (7,))
        peers.clear()
        assert (peers.unreached, peers.gone) == ((), ()), "a plan has formed"


# -- warm-up of a rank: a generation that it forms alone ------------------------------------------


@pytest.mark.parametrize(
    ("backend", "over", "is_open"),
    [("auto", "host", True), ("gloo", "gloo", True), ("gloo", "gloo", False)],
)
def test_a_generation_formed_alone_leaves_no_thread_and_its_errors_are_ignored(
    backend, over, is_open, monkeypatch
):
    connect = Mock(wraps=runtime.connect)
    monkeypatch.setattr(runtime, "connect", connect)
    monkeypatch.setattr(runtime, "LIMIT_S", 0.2)
    store = RendezvousServer("127.0.0.1")
    if not is_open:
        store.close()
    place = Place(0, 1, 0, 1, 0, 1)
    spec = RankSpec(job="alone", start=0, place=place, bind="127.0.0.1", backend=backend)
    runtime.form_alone(spec, store.address, b"")
    met = [terms for (terms,), _ in connect.call_args_list]
    assert sorted((e.rank, e.size, e.backend) for e in met) == [(0, 2, over), (1, 2, over)]
    assert not [each for each in threading.enumerate() if "warmup" in each.name]


@pytest.mark.parametrize(("state_bytes", "prepared"), [(None, 0), (0, 0), (100, 4 * (6 + 3))])
def test_a_newcomer_takes_the_memory_of_its_first_step_before_it_is_ready(state_bytes, prepared):
    """Of its gradients, if it is to receive a state: others wait for it then."""
    state = TorchState(torch.nn.Linear(2, 3))
    told = one_rank(lambda: run(lambda _: None)(state), state_bytes=state_bytes)
    assert told[0] == prepared
    assert isinstance(told[1], RankReady)
