"""A rank's output on its way to the scheduler: many lines in few messages, and a rank that waits.

Time is virtual.
"""

from __future__ import annotations

import asyncio

from nbelastic.cluster.worker import hosted_rank
from nbelastic.cluster.worker.hosted_rank import CROWDED, FULL, INTERVAL, PATIENCE, OutputBuffer
from tests.support.virtual_time import run


class Scene:
    """A buffer, what it has sent, and whether it lets the rank's pipe be read."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.waiting, self.paused = 0, False
        self.buffer = OutputBuffer(self.sent.append, lambda: self.waiting, self._pause)

    def _pause(self, paused: bool) -> None:
        self.paused = paused


def test_many_lines_take_one_message() -> None:
    async def main() -> None:
        scene = Scene()
        for number in range(1_000):
            scene.buffer.write(f"{number}\n".encode())
        await asyncio.sleep(INTERVAL / 2)
        assert not scene.sent
        await asyncio.sleep(INTERVAL)
        assert scene.sent == ["".join(f"{number}\n" for number in range(1_000))]
        await asyncio.sleep(10.0)
        assert len(scene.sent) == 1

    run(main())


def test_the_last_words_are_sent_at_once() -> None:
    async def main() -> None:
        scene = Scene()
        scene.buffer.write(b"end")
        scene.buffer.flush()
        assert scene.sent == ["end"]
        scene.buffer.flush()
        await asyncio.sleep(1.0)
        assert len(scene.sent) == 1

    run(main())


def test_a_letter_may_come_in_two_parts_and_what_is_no_text_is_replaced() -> None:
    async def main() -> None:
        scene = Scene()
        for part in (b"a\xc3", b"\xbc\xff\n"):
            scene.buffer.write(part)
            scene.buffer.flush()
        assert "".join(scene.sent) == "a\u00fc\N{REPLACEMENT CHARACTER}\n"

    run(main())


def test_a_long_text_is_sent_in_parts() -> None:
    async def main() -> None:
        scene = Scene()
        scene.buffer.write(b"ab" * (FULL + 10))
        assert [len(part) for part in scene.sent] == [FULL, FULL, 20]
        assert "".join(scene.sent) == "ab" * (FULL + 10)
        assert not scene.paused

    run(main())


def test_a_rank_that_is_faster_than_the_connection_waits() -> None:
    async def main() -> None:
        scene = Scene()
        scene.waiting = CROWDED + 1
        scene.buffer.write(b"x" * (FULL + 1))
        assert scene.paused
        await asyncio.sleep(PATIENCE / 2)
        assert not scene.sent
        scene.waiting = 0
        await asyncio.sleep(2 * hosted_rank.PAUSE)
        assert not scene.paused
        assert sum(map(len, scene.sent)) == FULL + 1

    run(main())


def test_a_connection_that_stands_still_holds_a_rank_for_a_moment_each_time() -> None:
    async def main() -> None:
        scene = Scene()
        scene.waiting = CROWDED + 1
        for _ in range(3):
            scene.buffer.write(b"x" * FULL)
            assert scene.paused
            await asyncio.sleep(PATIENCE / 2)
            assert scene.paused
            await asyncio.sleep(PATIENCE)
            assert not scene.paused
        scene.buffer.flush()
        assert sum(map(len, scene.sent)) == 3 * FULL

    run(main())


def print_lines(count: int) -> None:
    for number in range(count):
        print(number)


def test_a_rank_that_prints_without_end_is_not_lost(crew) -> None:
    job = crew.fit(print_lines, args=[100_000], np=2, heartbeat_timeout=2)
    assert job.logs(1).splitlines() == [str(number) for number in range(100_000)]
    assert not [event for event in job.history if event.kind == "lost"]
