"""Whatever ends a rank is an event of its job, and its process ends."""

from __future__ import annotations

import threading

import pytest

import nbelastic
from nbelastic.cluster import pack_function
from nbelastic.cluster.worker.rank import program
from nbelastic.elastic.ranks.runtime import RankSpec
from nbelastic.errors import JobStopped
from nbelastic.messages import Place, RankEvent, RankRaised
from tests.support.clusters import kinds, until


class Port:
    """Keeps the events of a rank."""

    def __init__(self):
        self.events = []

    def send(self, message):
        if isinstance(message, RankEvent):
            self.events.append(message.event)


def fail():
    raise ValueError("the function's own")


@pytest.mark.parametrize(
    "name", ["activate", "install", "unpack_call", "dumps", "trainers_of", "pack_error"]
)
def test_a_rank_that_raises_outside_its_function_says_so(monkeypatch, name):
    def boom(*args, **kwargs):
        raise SystemError(f"{name} is broken")

    monkeypatch.setattr(program, name, boom)
    port, place = Port(), Place(0, 1, 0, 1, 0, 1)
    payload, _ = pack_function(fail if name == "pack_error" else nbelastic.size, (), {})
    rank = program.RankProgram(RankSpec(job="job", start=3, place=place), payload, port)
    thread = threading.Thread(target=rank.run)  # whose context is its own
    thread.start()
    thread.join(60)
    (event,) = port.events
    assert isinstance(event, RankRaised)
    assert event.start == 3
    assert f"{name} is broken" in event.error


def swallow(place):
    import signal
    import time
    from pathlib import Path

    signal.signal(signal.SIGTERM, lambda *_: print("not yet"))
    Path(place).touch()
    while True:
        try:
            time.sleep(1)
        except BaseException:
            continue


def test_cancel_ends_a_rank_that_swallows_everything_and_spares_its_worker(crew, tmp_path):
    begun = tmp_path / "begun"
    job = crew.fit(swallow, args=[str(begun)], np=1, block=False)
    until(begun.exists, "the rank runs")
    before = crew.workers()
    job.cancel()
    with pytest.raises(JobStopped):
        job.result(60)
    assert "warning" not in kinds(job)
    crew.wait_until_whole(4)
    assert crew.workers() == before
