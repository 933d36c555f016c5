"""Ranks in processes of their own, which are killed and stopped."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from nbelastic.collectives import Rendezvous, RendezvousServer
from tests.collectives.worlds import BIND, MAKERS, PATIENCE_S, eventually, terms
from tests.support.processes import Process


class Crew:
    """Processes, with a store, in generations of which all that live are members."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind = kind
        self.store = RendezvousServer(BIND)
        self.members = [Process() for _ in range(size)]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for member in list(self.members):
            self.dismiss(member)
        self.store.close()

    def form(self) -> int:
        """Connect all members and check that they can work together."""
        generation, answers = self.connect()
        for answer in answers:
            answer.result(PATIENCE_S)
        total = sum(range(1, len(self.members) + 1))
        sums = [answer.result(PATIENCE_S) for answer in self.ask(allreduce)]
        assert sums == [total] * len(self.members)
        return generation

    def connect(self) -> tuple[int, list[Future[Any]]]:
        """Have all members make their communicators and begin to connect."""
        its = terms(size=len(self.members), store=self.store.address)
        for rank, member in enumerate(self.members):
            make = functools.partial(_make, self.kind, dataclasses.replace(its, rank=rank))
            member.ask(make, at_once=True).result(PATIENCE_S)
        return its.generation, self.ask(_connect)

    def ask(self, function: Callable[[Any], Any], *, at_once: bool = False) -> list[Future[Any]]:
        return [member.ask(function, at_once=at_once) for member in self.members]

    def dismiss(self, member: Process) -> None:
        """Kill a member."""
        self.members.remove(member)
        member.kill()

    def abort(self, reason: str) -> None:
        for answer in self.ask(lambda here: here.communicator.abort(reason), at_once=True):
            answer.result(PATIENCE_S)


def _make(kind: str, rendezvous: Rendezvous, here: Any) -> None:
    """Make a communicator, which can be aborted from now on."""
    here.previous, here.communicator = here.communicator, MAKERS[kind](rendezvous)


def _connect(here: Any) -> None:
    if here.previous is not None:
        here.previous.close()
    here.communicator = here.communicator.connect()


def allreduce(here: Any, length: int = 10) -> float:
    tensor = torch.full((length,), 1.0 + here.communicator.rank)
    here.communicator.allreduce(tensor)
    assert (tensor == tensor[0]).all()
    return tensor[0].item()


def until(member: Process, condition: Callable[[Any], Any], what: str) -> None:
    """Wait until a condition holds in the process of a member, whatever its rank does."""
    eventually(lambda: member.ask(condition, at_once=True).result(PATIENCE_S), what)


def is_waiting(here: Any) -> bool:
    return here.communicator.waiting


def threads(_here: Any) -> list[str]:
    return [thread.name for thread in threading.enumerate()]
