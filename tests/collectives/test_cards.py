"""What ranks tell each other of themselves, and what all conclude from it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nbelastic.collectives import cards
from nbelastic.collectives.cards import Card, Layout, this_host, why_not
from nbelastic.errors import CollectiveError


def layout_of(hosts, unable=()):
    """Return what ranks on hosts named by letters conclude."""
    return Layout.of(
        [Card("is too old" if rank in unable else "", host, "") for rank, host in enumerate(hosts)]
    )


def test_ranks_are_grouped_by_host_in_order():
    layout = layout_of("bcabb")
    assert layout.hosts == ((0, 3, 4), (1,), (2,))
    assert layout.crowded
    assert layout.neighbours(3) == (0, 3, 4)
    assert not layout_of("abc").crowded


@pytest.mark.parametrize(
    ("hosts", "peers"),
    [
        ("aabbb", [(0, 2), (1, 3), (0, 2), (1, 3), ()]),
        ("abab", [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ("abb", [(0, 1), (0, 1), ()]),
        ("aabbcc", [(0, 2, 4), (1, 3, 5)] * 3),
    ],
)
def test_a_slice_is_shared_by_those_in_one_position_on_every_host(hosts, peers):
    layout = layout_of(hosts)
    assert [layout.peers(rank) for rank in range(len(hosts))] == peers
    assert layout.slices == len({each for each in peers if each})


def test_only_who_has_neighbours_must_be_able_to_share():
    assert layout_of("aab", unable=[2]).trouble == ""
    assert layout_of("aab", unable=[1, 2]).trouble == "rank 1: is too old"


def test_a_card_is_read_as_it_was_written():
    card = Card("", this_host(), "a-door")
    assert Card.decode(card.encode(), 0) == card


@pytest.mark.parametrize(
    "value", [b"", b"\xff", b"{}", b"7", b"[1]", b'[99, "", "", ""]', b'[1, "", "", 3]']
)
def test_another_language_is_an_error(value):
    with pytest.raises(CollectiveError, match="rank 3 speaks another language"):
        Card.decode(value, 3)


def test_a_host_is_told_from_another_and_found_again():
    assert this_host() == this_host()
    assert this_host().endswith(str(cards.os.getuid()))


def test_what_is_in_the_way_is_said(monkeypatch):
    def fail(_size):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(cards, "core", SimpleNamespace(create=fail))
    assert "Function not implemented" in why_not()
    monkeypatch.setattr(cards, "core", None)
    monkeypatch.setattr(cards, "missing", "no compiler")
    assert "C++" in why_not()
    assert "no compiler" in why_not()
    monkeypatch.setattr(cards.sys, "platform", "plan9")
    assert "Linux" in why_not()
