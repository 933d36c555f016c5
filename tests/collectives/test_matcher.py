"""Matching of operations by name: pure, in all orders in which messages can come."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbelastic.collectives import RendezvousServer, consistency
from nbelastic.collectives.consistency import History
from nbelastic.collectives.rendezvous.client import MATCHING, RendezvousClient
from nbelastic.collectives.rendezvous.matcher import Matcher
from nbelastic.errors import CollectiveError
from tests.collectives.worlds import BIND, terms

NAMES = ("a", "b", "c")


def offer(name, members):
    its = {"do": "offer", "set": "", "name": name, "members": members}
    return its | {"text": "sum", "numbers": [], "spec": {}}


def blocked(name, begun=0):
    return {"do": "blocked", "set": "", "name": name, "begun": begun}


def waits(text, begun=1, completed=0):
    return {"do": "waits", "text": text, "begun": begun, "completed": completed}


class World:
    """A matcher and what each rank has received."""

    def __init__(self, size, connected=True):
        self.matcher = Matcher(size)
        self.members = list(range(size))
        self.received = {rank: [] for rank in self.members}
        for rank in self.members if connected else ():
            self.connect(rank)

    def connect(self, rank):
        self.received[rank] += self.matcher.connected(rank)

    def send(self, rank, message):
        for to, decision in self.matcher.receive(rank, message):
            self.received[to].append(decision)

    def kinds(self, rank):
        return [message["do"] for message in self.received[rank]]


@given(st.data())
def test_whatever_the_order_all_ranks_launch_the_same_in_the_same_order(data):
    size = data.draw(st.integers(2, 4))
    world = World(size, connected=False)
    left = {rank: data.draw(st.permutations(NAMES)) for rank in world.members}
    unconnected = set(world.members)
    while any(left.values()) or unconnected:
        choices = [("offer", r) for r in world.members if left[r]]
        choices += [("connect", r) for r in sorted(unconnected)]
        what, rank = data.draw(st.sampled_from(choices))
        if what == "connect":
            unconnected.remove(rank)
            world.connect(rank)
        else:
            name, *left[rank] = left[rank]
            world.send(rank, offer(name, world.members))
    orders = [[message["name"] for message in world.received[rank]] for rank in world.members]
    assert sorted(orders[0]) == sorted(NAMES)
    assert orders == [orders[0]] * size


def test_ranks_that_are_blocked_on_different_names_are_stuck():
    world = World(2)
    for rank, name in enumerate("ab"):
        world.send(rank, offer(name, [0, 1]))
        world.send(rank, blocked(name))
    assert [world.kinds(rank) for rank in range(2)] == [["stuck"], ["ask", "stuck"]]
    assert world.received[0][0]["sides"] == [(0, "sum"), (1, "sum")]


STUCK = [(0, "sum"), (1, "barrier")]


@pytest.mark.parametrize(
    ("said", "sides"),
    [
        ([[waits("barrier")]] * 3, STUCK),
        ([[waits("barrier")]] * 2, None),  # not said often enough
        ([[waits("barrier", begun=0)]] * 9, None),  # the rank that is blocked has begun it, too
        ([[waits("")]] * 9, None),  # it computes
        ([[waits("barrier", completed=n)] for n in range(9)], None),  # it goes on
        ([[waits(each)] for each in ("barrier", "barrier", "") * 3], None),  # computes in between
        ([[waits("barrier"), waits("")]] * 9, None),  # another rank computes
    ],
)
def test_a_rank_that_waits_without_a_name_is_believed_if_it_cannot_go_on(said, sides):
    world = World(1 + len(said[0]))
    world.send(0, offer("a", world.members))
    for each in said:
        world.send(0, blocked("a"))
        for rank, message in enumerate(each, 1):
            world.send(rank, message)
    assert world.kinds(1).count("ask") == len(said)
    if sides is not None:
        assert world.received[0][-1]["sides"] == sides
        return
    assert world.kinds(0) == []
    for rank in world.members[1:]:
        world.send(rank, offer("a", world.members))
    assert world.kinds(0) == ["go"]


def test_what_a_rank_waited_for_another_time_counts_no_more():
    world = World(3)
    world.send(0, offer("a", [0, 1, 2]))
    for _ in range(3):
        world.send(0, blocked("a"))
        world.send(1, waits("barrier"))
    for rank in (1, 2):
        world.send(rank, offer("a", [0, 1, 2]))
    world.send(0, offer("b", [0, 1, 2]))
    world.send(0, blocked("b", begun=0))
    for _ in range(3):
        world.send(2, waits("barrier"))
    assert "stuck" not in world.kinds(0)


@pytest.mark.parametrize("values", [2, 3])
def test_ranks_that_leave_an_exchange_are_announced_once_or_not_at_all(values):
    world = World(3)
    for rank in range(values):
        world.send(rank, {"do": "exchange", "value": bytes([rank])})
    assert world.kinds(2) == ["exchanged"] * (values == 3)
    told = [(other, {"do": "gone", "rank": 1}) for other in (0, 2)] if values == 2 else []
    assert world.matcher.lose(1) == told
    assert world.matcher.lose(0) == []


@pytest.mark.parametrize("texts", ["aaa", "aba"])
def test_ranks_compare_what_they_are_about_to_do(texts):
    def compare(rank, text, number=0, begun=False):
        its = {"do": "compare", "set": "", "number": number, "members": [0, 1, 2]}
        world.send(rank, {**its, "text": text, "value": rank, "begun": begun})

    world = World(3)
    compare(1, texts[1])
    assert [world.kinds(rank) for rank in range(3)] == [["asked"], [], ["asked"]]
    compare(0, texts[0], begun=True)
    assert world.kinds(1) == []
    compare(2, texts[2])
    for rank in range(3):
        decision = world.received[rank][-1]
        assert (decision["do"], decision["number"], decision["begun"]) == ("compared", 0, True)
        assert decision["values"] == [0, 1, 2]
        assert decision["texts"] == (None if texts == "aaa" else [*texts])
    compare(0, "next", 1)
    assert world.kinds(1)[-1] == "asked"


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.integers(0, 40))
def test_a_history_foresees_what_repeats_and_forgets_what_is_long_ago(cycle, before):
    history, rounds, missed = History(), 60, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consistency, "_MOST_KEPT", 64)
        for number in range(before):
            history.add(number)
        for each in range(rounds):
            for pattern in cycle:
                missed += each >= 10 and not history.foresees(pattern)
                history.add(pattern)
    assert history.number == before + rounds * len(cycle)
    assert history.at(history.number - 1) == cycle[-1]
    assert missed <= 4 * (1 + rounds * len(cycle) // 32)  # a few each time that it forgets


@pytest.fixture
def clients():
    with contextlib.closing(RendezvousServer(BIND)) as store, contextlib.ExitStack() as stack:
        its = {"store": store.address, "generation": 1}
        made = [RendezvousClient(terms(rank, **its), MATCHING) for rank in range(2)]
        for client in made:
            stack.callback(client.close)
        yield made


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_rank_that_leaves_before_it_is_connected_has_gone(clients, order):
    """For a rank that is connected before, and one that is connected after."""
    if order == "before":
        clients[0].connect()
    clients[1].abort()
    with pytest.raises(CollectiveError, match="this rank has left"):
        clients[1].connect()
    clients[1].close()
    if order == "after":
        clients[0].connect()
    assert clients[0].receive() == {"do": "gone", "rank": 1}
