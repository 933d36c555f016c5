"""Matching of the ranks of a generation: values, operations by name, joined ranks.

One matcher serves the ranks that meet at their rendezvous server for a subject. It is pure: it
takes a message of a rank and returns messages to ranks. All ranks receive the same decisions in
the same order, so they can launch operations in that order.

==========  =======================================================================================
exchange    a rank gives its value
exchanged   the values of all ranks
offer       a rank begins the operation `name` of the process set `set`, whose ranks are `members`
go          all have begun it: what each has offered, None for those that have joined instead
blocked     a rank waits for an operation that it has offered, and does nothing else; said again
            and again, with the number of operations without a name that it has begun
ask         has a rank say what it waits for, while others are blocked
waits       what a rank waits for that it has not offered, or that it does not wait
stuck       all ranks wait, for operations that the others have not begun
missing     which ranks have not begun an operation
ping        answered by pong, after all decisions on what was offered before
join        a rank has no more data; it has taken part in `done` operations
step        a rank begins an operation without a name, its `number`-th, while others have joined
together    all ranks have joined; `last` was the last
compare     what a rank is about to do, as the `number`-th operation that ranks compare; whether it
            has `begun` it already, because it was foreseen
asked       another rank compares that operation, so it must not be begun without
compared    what all ranks are about to do: their values, and their texts if these differ
gone        a rank has closed its connection, so it begins nothing more
refused     why a rank cannot take part
==========  =======================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

Message = dict[str, Any]

_SURE = 3
"""How often in a row a rank says that it waits for the same operation until it is believed."""


encode = msgspec.msgpack.encode
decode = msgspec.msgpack.Decoder(Message).decode


@dataclass
class _Offers:
    """An operation that some ranks have begun."""

    members: list[int]
    offers: dict[int, Message] = field(default_factory=dict)


class Matcher:
    """Decisions for the ranks of a generation."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: dict[tuple[str, str], _Offers] = {}
        self._blocked: dict[int, tuple[str, str]] = {}
        self._begun: dict[int, int] = {}  # operations without a name, by rank that is blocked
        self._elsewhere: dict[int, tuple[Message, int]] = {}  # what ranks wait for; how often said
        self._joined: dict[int, int] = {}  # how many operations each had done, in order of joining
        self._steps: dict[int, Message] = {}
        self._connected: set[int] = set()
        self._gone: dict[int, None] = {}  # in the order in which they went
        self._kept: dict[int, list[Message]] = {}
        self._compared: dict[tuple[str, int], dict[int, Message]] = {}
        self._values: dict[int, bytes] = {}

    def refusal(self, rank: int, size: int) -> str:
        """Return why a rank cannot take part in a generation of `size`; empty if it can."""
        if size != self._size or rank >= size:
            return f"rank {rank} of {size} in a generation of {self._size}"
        known = rank in self._connected or rank in self._gone
        return f"rank {rank} has already joined" if known else ""

    def connected(self, rank: int) -> list[Message]:
        """Return the messages that a newly connected rank has missed."""
        self._connected.add(rank)
        missed = self._kept.pop(rank, [])
        return missed + [{"do": "gone", "rank": other} for other in self._gone]

    def lose(self, rank: int) -> list[tuple[int, Message]]:
        """Take the end of a rank's connection; return messages for the ranks that are left."""
        self._connected.discard(rank)
        self._gone[rank] = None
        # All leave an exchange when it is over, or when the first has left.
        if self._values and (len(self._values) == self._size or len(self._gone) > 1):
            return []
        return [(other, {"do": "gone", "rank": rank}) for other in sorted(self._connected)]

    @property
    def is_over(self) -> bool:
        """Whether all ranks have gone."""
        return len(self._gone) == self._size

    def receive(self, rank: int, message: Message) -> list[tuple[int, Message]]:
        """Take a message of a rank; return messages with the ranks that they are for."""
        decisions: list[tuple[int, Message]] = getattr(self, f"_on_{message['do']}")(rank, message)
        for to, decision in decisions:
            if to not in self._connected and to not in self._gone:
                self._kept.setdefault(to, []).append(decision)  # until it connects
        return [(to, decision) for to, decision in decisions if to in self._connected]

    def _on_exchange(self, rank: int, message: Message) -> list[tuple[int, Message]]:
        self._values[rank] = message["value"]
        if len(self._values) < self._size:
            return []
        ranks = range(self._size)
        decision = {"do": "exchanged", "values": [self._values[each] for each in ranks]}
        return [(each, decision) for each in ranks]

    def _on_offer(self, rank: int, message: Message) -> list[tuple[int, Message]]:
        self._blocked.pop(rank, None)  # it goes on, so it waits for nothing
        key = message["set"], message["name"]
        entry = self._entries.setdefault(key, _Offers(message["members"]))
        entry.offers[rank] = message
        return self._decide(key) or self._if_stuck()

    def _decide(self, key: tuple[str, str]) -> list[tuple[int, Message]]:
        """Have an operation begin if all ranks have begun it or joined."""
        entry = self._entries[key]
        present = {*entry.offers, *(self._joined if key[0] == "" else ())}  # a set has no `join`
        if not present.issuperset(entry.members):
            return []
        del self._entries[key]
        for member in entry.members:
            if self._blocked.get(member) == key:
                del self._blocked[member]
        offers = [entry.offers.get(member) for member in entry.members]
        texts = [None if each is None else each["text"] for each in offers]
        first = next(text for text in texts if text is not None)
        decision = {
            "do": "go",
            "set": key[0],
            "name": key[1],
            "members": entry.members,
            "numbers": [None if each is None else each["numbers"] for each in offers],
            "text": first,
            "texts": None if {*texts} <= {first, None} else texts,
            "spec": next(each["spec"] for each in offers if each is not None),
        }
        return [(member, decision) for member in entry.members]

    def _on_blocked(self, rank: int, message: Message) -> list[tuple[int, Message]]:
        key = message["set"], message["name"]
        if key not in self._entries:
            return []  # decided meanwhile: the messages crossed
        if self._blocked.get(rank) != key:
            self._elsewhere.clear()  # what ranks waited for at another time
        self._blocked[rank] = key
        self._begun[rank] = message["begun"]
        idle = {*self._blocked, *self._joined}
        return self._if_stuck() or [(r, {"do": "ask"}) for r in range(self._size) if r not in idle]

    def _on_waits(self, rank: int, message: Message) -> list[tuple[int, Message]]:
        before, times = self._elsewhere.get(rank, (message, 0))
        self._elsewhere[rank] = message, times + 1 if before == message else 1
        return self._if_stuck()

    def _if_stuck(self) -> list[tuple[int, Message]]:
        """Fail the operations that all ranks wait for, if no rank is left to begin the rest."""
        if not self._blocked:
            return []
        least = min(self._begun[rank] for rank in self._blocked)
        sides: dict[int, str | None] = dict.fromkeys(self._joined)
        for rank, (waits, times) in self._elsewhere.items():
            # A rank that is blocked has not begun what this one waits for, so it is in vain.
            if waits["text"] and waits["begun"] > least and times >= _SURE:
                sides[rank] = waits["text"]
        for rank, key in self._blocked.items():
            sides[rank] = self._entries[key].offers[rank]["text"]
        if len(sides) < self._size:
            return []  # a rank that computes may still begin it
        keys = set(self._blocked.values())
        self._blocked.clear()
        decisions: list[tuple[int, Message]] = []
        for key in keys:
            entry = self._entries.pop(key)
            stuck = {"do": "stuck", "set": key[0], "name": key[1], "sides": sorted(sides.items())}
            decisions += [(rank, stuck) for rank in entry.offers]
        return decisions

    def _on_compare(self, rank: int, message: Message) -> list[tuple[int, Message]]:
        key = message["set"], message["number"]
        said, members = self._compared.setdefault(key, {}), message["members"]
        said[rank] = message
        its = {"set": key[0], "number": key[1]}
        if len(said) < len(members):
            others = [member for member in members if member != rank and len(said) == 1]
            return [(member, {"do": "asked", **its}) for member in others]
        del self._compared[key]
        texts = [said[member]["text"] for member in members]
        decision = {
            "do": "compared",
            **its,
            "members": members,
            "values": [said[member]["value"] for member in members],
            "texts": None if len({*texts}) == 1 else texts,
            "begun": any(each["begun"] for each in said.values()),
        }
        return [(member, decision) for member in members]

    def _on_missing(self, rank: int, message: Message) -> list[tuple[int, Message]]:
        entry = self._entries.get((message["set"], message["name"]))
        missing = [] if entry is None else [m for m in entry.members if m not in entry.offers]
        return [(rank, {**message, "ranks": missing})]

    def _on_ping(self, rank: int, message: Message) -> list[tuple[int, Message]]:
        return [(rank, {"do": "pong", "number": message["number"]})]

    def _on_join(self, rank: int, message: Message) -> list[tuple[int, Message]]:
        done = message["done"]
        self._blocked.pop(rank, None)
        self._joined[rank] = done
        if len(self._joined) == self._size:
            together = {"do": "together", "last": rank, "done": max(self._joined.values())}
            self._joined.clear()
            self._steps.clear()
            return [(each, together) for each in range(self._size)]
        others = [each for each in range(self._size) if each not in self._joined]
        decisions: list[tuple[int, Message]] = [(each, message) for each in others]
        decisions += [(rank, step) for n, step in sorted(self._steps.items()) if n > done]
        for key in list(self._entries):
            decisions += self._decide(key)
        return decisions or self._if_stuck()

    def _on_step(self, _rank: int, message: Message) -> list[tuple[int, Message]]:
        if not self._joined or message["number"] in self._steps:  # the first rank tells
            return []
        self._steps[message["number"]] = message
        joined = self._joined.items()
        return [(each, message) for each, done in joined if message["number"] > done]
