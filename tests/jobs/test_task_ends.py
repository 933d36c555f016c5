"""Whatever ends a rank is an event of its job, and its process ends."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import nbelastic
from nbelastic.cluster import pack_function
from nbelastic.cluster.worker.rank import program
from nbelastic.elastic.ranks import telemetry
from nbelastic.elastic.ranks.runtime import RankSpec
from nbelastic.messages import Place, RankEvent, RankRaised
from tests.support.clusters import until


def fail():
    raise ValueError("the function's own")


@pytest.mark.parametrize("name", ["activate", "install", "take_settings", "dumps", "pack_error"])
def test_a_rank_that_raises_outside_its_function_says_so(monkeypatch, name):
    def boom(*args, **kwargs):
        raise SystemError(f"{name} is broken")

    monkeypatch.setattr(program, name, boom)
    monkeypatch.setattr(telemetry.Telemetry, "take", boom)  # nothing waits for figures
    spec, sent = RankSpec(job="job", start=3, place=Place(0, 1, 0, 1, 0, 1)), []
    payload, _ = pack_function(fail if name == "pack_error" else nbelastic.size, (), {})
    rank = program.RankProgram(spec, payload, sent.append)
    thread = threading.Thread(target=rank.run)  # whose context is its own
    thread.start()
    thread.join(60)
    (event,) = (each.event for each in sent if isinstance(each, RankEvent))
    assert isinstance(event, RankRaised)
    assert event.start == 3
    assert f"{name} is broken" in event.error


def goes_on(folder):
    def save(name):
        until((folder / "go").exists, "to go on")
        torch.save(torch.ones(1000), folder / name)

    threading.Thread(target=save, args=["thread"]).start()
    ThreadPoolExecutor().submit(save, "executor")
    return 1


def test_what_goes_on_after_the_function_ends_or_is_said_to_be_cut_off(crew, tmp_path):
    job = crew.fit(goes_on, args=[tmp_path], np=1, block=False)
    until(lambda: "of 1 rank still run" in job.status.reason, "the function has returned")
    assert not job.wait(3.0), "not even after what a rank had before it was ended"
    (tmp_path / "go").touch()
    assert job.result(60) == 1 and job.status.warnings == () and job.status.errors == 0
    assert all(torch.load(tmp_path / name).sum() == 1e3 for name in ("thread", "executor"))
    (tmp_path / "go").unlink()
    job = crew.fit(goes_on, args=[tmp_path], np=1, exit_timeout=0.1)
    assert job.result() == 1 and job.status.errors == 1
    assert "was cut off after its function had returned" in job.status.headlines[0]
    assert "did not end within 0.1 s (exit_timeout)" in job.status.headlines[0]
    assert job.status.state_in_words == "finished with 1 error"
