"""A rank as its agent watches it, with a process that a test makes up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nbelastic.cluster.process_state import ProcessState
from nbelastic.cluster.worker import hosted_rank
from nbelastic.messages import Beat, Heartbeats, RankBeat


class Process:
    waits = False

    def __init__(self, state: str) -> None:
        self.kind, self.at, self.signals = state, 0.0, list[tuple[int, str]]()

    def state(self) -> ProcessState:
        self.at += 5.0
        return ProcessState(self.kind, 0.0, self.at)

    def send_signal(self, number: int, reason: str) -> None:
        self.signals.append((number, reason))


@pytest.mark.parametrize(
    ("state", "heard", "words"),
    [
        ("stopped", True, "was stopped"),
        ("stopped", False, "was stopped"),
        ("alive", True, "does nothing"),
        ("alive", False, ""),
    ],
)
def test_a_process_that_is_stopped_is_ended_also_before_its_first_heartbeat(
    monkeypatch: pytest.MonkeyPatch, state: str, heard: bool, words: str
) -> None:
    monkeypatch.setattr(hosted_rank, "SILENCE_S", -1.0)
    process: Any = Process(state)

    async def main() -> None:
        rank = hosted_rank.HostedRank(
            ("job", 0), lambda *_: process, print, int, print, heartbeat_timeout=-1, exit_timeout=9
        )
        if heard:
            rank._take(Heartbeats((RankBeat("job", Beat(0, 0, 0, False, 0)),)))
        rank.beat()
        rank.beat()

    asyncio.run(main())
    assert words in "".join(reason for _, reason in process.signals)
    assert bool(process.signals) == bool(words)
