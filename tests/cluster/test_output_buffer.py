"""Output on its way to the event loop: many lines in few calls, and never more than a bit of it."""

from __future__ import annotations

import threading

from nbelastic.cluster.worker.output_buffer import FULL, OutputBuffer

from nbelastic.cluster.worker import output_buffer


class Loop:
    """An event loop that is turned by hand."""

    def __init__(self):
        self.calls = []
        self.called = threading.Semaphore(0)

    def add_callback(self, callback, *args):
        self.calls.append((callback, args))
        self.called.release()

    def call_later(self, delay, callback, *args):
        self.add_callback(callback, *args)

    def turn(self):
        calls, self.calls = self.calls, []
        for callback, args in calls:
            callback(*args)


class Scene:
    def __init__(self):
        self.loop, self.sent, self.waiting = Loop(), [], 0
        self.buffer = OutputBuffer(
            self.loop, lambda key, text: self.sent.append((key, text)), lambda: self.waiting
        )


def test_many_lines_take_one_call_into_the_loop():
    scene = Scene()
    for number in range(1_000):
        scene.buffer.write(("job", 0), f"{number}\n")
        scene.buffer.write(("job", 1), ".")
    assert len(scene.loop.calls) == 2
    scene.loop.turn()
    assert not scene.sent
    scene.loop.turn()
    assert dict(scene.sent) == {
        ("job", 0): "".join(f"{number}\n" for number in range(1_000)),
        ("job", 1): "." * 1_000,
    }
    scene.loop.turn()
    assert not scene.loop.calls and len(scene.sent) == 2


def test_the_last_words_are_sent_at_once():
    scene = Scene()
    scene.buffer.write(("job", 0), "end")
    scene.buffer.flush(("job", 0))
    assert scene.sent == [(("job", 0), "end")]
    scene.buffer.flush(("job", 0))
    assert len(scene.sent) == 1


def test_a_long_text_is_sent_in_parts(monkeypatch):
    monkeypatch.setattr(output_buffer, "PATIENCE", 0.0)
    scene = Scene()
    text = "ab" * (FULL + 10)
    scene.buffer.write(("job", 0), text)
    scene.buffer.flush(("job", 0))
    assert [len(part) for _, part in scene.sent] == [FULL, FULL, 20]
    assert "".join(part for _, part in scene.sent) == text


def test_a_thread_that_is_faster_than_the_connection_waits(monkeypatch):
    monkeypatch.setattr(output_buffer, "PATIENCE", 30.0)
    scene = Scene()
    scene.waiting = output_buffer.CROWDED + 1
    writer = threading.Thread(target=scene.buffer.write, args=(("job", 0), "x" * (FULL + 1)))
    writer.start()
    for _ in range(2):
        assert scene.loop.called.acquire(timeout=30)
    for _ in range(5):
        scene.loop.turn()
    assert writer.is_alive() and not scene.sent
    scene.waiting = 0
    scene.loop.turn()
    writer.join(30)
    assert not writer.is_alive()
    assert sum(len(text) for _, text in scene.sent) == FULL + 1


def test_a_connection_that_stands_still_holds_a_thread_for_a_moment_only(monkeypatch):
    monkeypatch.setattr(output_buffer, "PATIENCE", 0.01)
    scene = Scene()
    for _ in range(3):
        scene.buffer.write(("job", 0), "x" * FULL)
    scene.buffer.flush(("job", 0))
    assert sum(len(text) for _, text in scene.sent) == 3 * FULL


def print_lines(count):
    for number in range(count):
        print(number)


def test_a_rank_that_prints_without_end_is_not_lost(crew):
    job = crew.fit(print_lines, args=[100_000], np=2, heartbeat_timeout=2)
    assert job.logs(1).splitlines() == [str(number) for number in range(100_000)]
    assert not [event for event in job.history if event.kind == "lost"]
