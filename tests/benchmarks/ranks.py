"""Ranks that do what a test asks of them."""

from __future__ import annotations

import os
import time


class Rank:
    def __init__(self, rank: int, size: int, mark: str = "") -> None:
        self.rank, self.size, self.mark = rank, size, mark

    def who(self) -> tuple[int, int, str]:
        return self.rank, self.size, self.mark

    def process(self) -> int:
        return os.getpid()

    def sleep(self, *seconds: float) -> None:
        time.sleep(seconds[self.rank])

    def fail(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("as it was told to")

    def die(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(3)

    def close(self) -> None:
        pass
