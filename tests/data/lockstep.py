"""Ranks as threads that run one at a time, and take turns where they exchange something.

Threads share torch's random generators. A rank is interrupted at exchanges only, after which a
loader seeds them again. So ranks do not disturb each other, as if each had a process of its own.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from nbelastic.collectives import SoloCommunicator
from nbelastic.elastic.ranks.context import activate
from tests.support.world import StaticContext

if TYPE_CHECKING:
    from collections.abc import Callable


class Turns:
    """What all ranks of a world share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running = threading.Lock()
        self.all_there = threading.Barrier(size)
        self.values: dict[int, dict[int, Any]] = {}

    def exchange(self, number: int, rank: int, value: Any) -> list[Any]:
        self.values.setdefault(number, {})[rank] = value
        self.running.release()
        try:
            self.all_there.wait()
        finally:
            self.running.acquire()
        return [self.values[number][each] for each in range(self.size)]


class TurnsCommunicator(SoloCommunicator):
    """The operations that sources of unknown length use."""

    def __init__(self, turns: Turns, rank: int) -> None:
        super().__init__(generation=1)
        self._turns, self._rank, self._number = turns, rank, 0

    def _exchange(self, value: Any) -> list[Any]:
        self._number += 1
        return self._turns.exchange(self._number, self._rank, value)

    def agree(self, text: str, number: int = 0) -> list[int]:
        found = self._exchange((text, number))
        assert len({each for each, _ in found}) == 1
        return [each for _, each in found]

    def allgather_bytes(self, record: bytes) -> list[bytes]:
        return self._exchange(record)


def run_in_turns(size: int, function: Callable[[StaticContext], Any]) -> list[Any]:
    """Run `function(context)` on `size` ranks; return what each returned, or raise the first."""
    turns = Turns(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        communicator = TurnsCommunicator(turns, rank)
        context = StaticContext(communicator)
        context.rank, context.size = rank, size
        communicator.size = size  # type: ignore[misc]
        with turns.running:
            try:
                with activate(context):
                    results[rank] = function(context)
            except threading.BrokenBarrierError:
                pass  # another rank has failed
            except BaseException as error:
                errors.append(error)
                turns.all_there.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    return results
