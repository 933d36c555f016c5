"""When a rank looks for those it cannot reach, and what it says of them."""

import threading
from unittest.mock import Mock

import pytest
import torch

from nbelastic.collectives import RendezvousServer
from nbelastic.elastic import run
from nbelastic.elastic.ranks import runtime
from nbelastic.elastic.ranks.runtime import RankRuntime, RankSpec
from nbelastic.elastic.ranks.session import Session
from nbelastic.errors import CollectiveError
from nbelastic.messages import Member, Place, Plan, RankReady, Slot
from nbelastic.torch.state.torch_state import TorchState
from tests.elastic.members import one_rank


def test_all_others_are_asked_after_a_second_failure_in_a_row():
    asked, told, dead = [], [], iter([(2, 0), None, None, (), ()])

    def report(event):
        told.append(event)
        if isinstance(event, RankReady):
            members = (Member(s, Slot("", "", "", ""), (f"10.0.0.{s}", 1), 0) for s in (3, 5, 7))
            plan = Plan(len(told), tuple(members), loop=1)
            threading.Thread(target=session.on_plan, args=[plan]).start()

    def meet(_):
        if (ranks := next(dead)) is None:
            raise CollectiveError("no peer")
        found = Mock(dead_ranks=ranks)
        found.connect.return_value = found
        return found

    def probe(addresses):
        asked.append([host for host, _ in addresses])
        return [len(addresses) - 1]

    spec = RankSpec(job="job", start=5, place=Place(1, 3, 0, 1, 0, 1), bind="127.0.0.1")
    session = Session(spec, report, RankRuntime(connect=meet, probe=probe))
    session.form(1)
    session.form(1)
    ready = [(each.unreached, each.gone) for each in told if isinstance(each, RankReady)]
    assert ready == [((), ()), ((), (7, 3)), ((), (7, 3)), ((7,), (7, 3))], "one is bad luck"
    assert asked == [["10.0.0.3", "10.0.0.7"]]
    session.form(1)
    assert (told[-2].unreached, told[-2].gone) == ((), ()), "a plan has formed"
    session.close()


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
