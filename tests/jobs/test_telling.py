"""What ranks report and print reaches their owner, and what is displayed never harms a job."""

import contextlib
import re
import threading
from types import SimpleNamespace

import pytest

import nbelastic
from nbelastic import render
from nbelastic.cli.run import exit_code
from nbelastic.driver import display, driver_of
from tests.support.clusters import kinds, until
from tests.support.logs import own_records
from tests.support.training import Fault, Workload, check


def reporting(epochs, marks):
    import os
    import signal
    import time

    import nbelastic.torch as hvd

    hvd.init()
    hvd.device()
    sampler = hvd.elastic.ElasticSampler(range(48), shuffle=False)
    state = hvd.elastic.TorchState(sampler=sampler, epoch=0, batch=0)
    state.set_total(epoch=epochs, batch=3)

    @hvd.elastic.run
    def loop(state):
        for state.epoch in range(state.epoch, epochs):
            while state.batch < 3:
                time.sleep(0.05)
                hvd.barrier()
                place = 10 * state.epoch + state.batch
                nbelastic.report(rank=hvd.rank(), size=hvd.size(), place=place)
                print(f"at {state.epoch}.{state.batch}")
                if (state.epoch, state.batch, hvd.rank()) == (1, 1, 1):
                    with contextlib.suppress(FileExistsError):
                        os.close(os.open(marks / "killed", os.O_CREAT | os.O_EXCL))
                        os.kill(os.getpid(), signal.SIGKILL)
                state.sampler.record_batch(state.batch, 4)
                state.batch += 1
                state.commit()
            state.batch = 0

    loop(state)
    return hvd.size()


def test_a_rank_prints_in_every_way_and_its_child_processes_too(crew):
    def talk(raises):
        import faulthandler
        import subprocess
        import sys

        faulthandler.enable()
        sys.stdout.reconfigure(line_buffering=True)
        sys.stdout.buffer.write("bytes ü\n".encode())
        subprocess.run(["echo", "a child"], stdout=sys.stdout, check=True)
        subprocess.run(["echo", "another"], check=True)
        if raises:
            raise ValueError("after the child")

    lines = ["a child", "another", "bytes ü"]  # of which the last is flushed at the end
    assert sorted(crew.fit(talk, args=[False], np=1).logs(rank=0).splitlines()) == lines
    job = crew.fit(talk, args=[True], np=1, block=False)
    with pytest.raises(ValueError, match="after the child"):
        job.result()
    assert "a child" in job.logs(rank=0).splitlines()


@pytest.mark.parametrize("how", ["breakpoint", "pdb", "input"])
def test_a_rank_without_a_console_says_how_to_debug(crew, how):
    def stop():
        import pdb

        {"breakpoint": breakpoint, "pdb": pdb.set_trace, "input": input}[how]()
        return nbelastic.rank()

    with pytest.raises(nbelastic.errors.RankFailed, match="call it in the notebook without fit"):
        crew.fit(stop, np=1)


def test_reports_are_means_by_place_each_once_though_a_rank_dies(crew, tmp_path):
    job = crew.fit(reporting, args=[6, tmp_path], np=4, min_np=2)
    assert "lost" in kinds(job)
    rows = job.metrics.to_dict("records")
    assert [row["place"] for row in rows] == [10 * e + b for e in range(6) for b in range(3)]
    assert [row["step"] for row in rows] == list(range(18))
    size = rows[-1]["size"]  # a newcomer may still join at the last commit
    assert (rows[-1]["ranks"], rows[-1]["rank"]) == (size, (size - 1) / 2)  # nothing is held back
    assert driver_of(job).log.metrics.curves(500)["place"][0] == (0.0, 0.0)


PHASES = ["aborted", "restored", "ready", "planned", "connected", "synchronised", "stepped"]


def test_the_history_tells_where_the_time_of_a_recovery_went(crew, tmp_path):
    work = Workload(
        tmp_path, epochs=6, optimizer="adamw", faults=(Fault(rank=1, epoch=1, batch=1),)
    )
    job = crew.fit(work, np=4, min_np=2, block=False)
    seen = []
    while not job.wait(0.05):
        seen.append(job.status)
    check(job.results(), work)
    told = [event for event in job.history if event.kind == "phases"]
    assert {event.rank for event in told} == {0}
    (event,) = [event for event in told if "restored" in event.figures]
    assert list(event.figures) == ["noticed", *PHASES, "batches", "samples"]
    times = [event.figures[name] for name in ("noticed", *PHASES)]
    assert times == sorted(times)
    assert event.detail.startswith(f"noticed 0.0, aborted {times[1]:.1f}, ")
    assert event.figures["batches"] >= 0 and event.figures["samples"] >= 0
    names = {str(name) for name in crew.cluster.workers}
    assert {event.name for event in job.history if event.kind == "lost"} <= names
    sizes = {rank.state_bytes for status in seen for rank in status.ranks} - {0}
    assert len(sizes) <= 2 and max(sizes) > 1000  # without and with the optimizer's state
    assert min(rank.resident_bytes for rank in job.status.ranks) > 5e7  # Python and torch


class Recorder:
    """A display that notes how it is used, and can be made to fail."""

    def __init__(self, *, broken=False):
        self.calls = []
        self.broken = broken

    def _note(self, call):
        self.calls.append(call)
        if self.broken:
            raise RuntimeError("a fault of the display")

    def show(self, job):
        self._note(f"show {job.name}")

    def label(self, file):
        self._note("label")
        return "The cell" if file == __file__ else None

    @contextlib.contextmanager
    def watching(self, job):
        self._note(f"watching {job.name}")
        yield self
        self._note("left")

    def tick(self):
        self._note("tick")

    def say(self, text):
        self._note(text)


@pytest.fixture
def set_display():
    before = display._display
    display._complain.cache_clear()
    yield display.set_display
    display.set_display(before)


def test_a_display_is_told_of_every_job_and_ticks_while_somebody_waits(crew, set_display):
    import time

    recorder = Recorder()
    set_display(recorder)
    job = nbelastic.fit(time.sleep, args=[0.5], cluster=crew.client, np=2, name="shown")
    assert recorder.calls[0] == "watching shown"
    assert recorder.calls.count("tick") >= 2
    assert recorder.calls[-1] == "left"
    job._ipython_display_()
    assert recorder.calls[-1] == "show shown"


def test_a_broken_display_is_complained_of_once_and_harms_nothing(crew, set_display, caplog):
    set_display(Recorder(broken=True))
    work = nbelastic.fit(nbelastic.size, cluster=crew.client, np=2)
    assert work.results() == [2, 2]
    assert nbelastic.fit(nbelastic.size, cluster=crew.client, np=2).results() == [2, 2]
    assert len([r for r in own_records(caplog) if "display" in r.message]) == 1


def fails_later_on_rank_1(steps):
    import nbelastic.torch as hvd

    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def train(state):
        for state.step in range(state.step, steps):
            hvd.barrier()
            state.commit()
            if state.step == 5 and hvd.rank() == 1 and hvd.size() == 2:
                raise LookupError("a batch that is not there")

    train(state)


def test_the_loss_of_a_rank_by_an_error_says_in_which_line(crew, set_display):
    set_display(Recorder())
    job = crew.fit(fails_later_on_rank_1, args=[30], np=2, min_np=1)
    lost = next(event for event in job.history if event.kind == "lost")
    assert re.search(
        r"LookupError: a batch.*; raised at The cell, line \d+, in train$", lost.detail
    )
    (headline,) = job.status.headlines
    assert re.fullmatch(r"rank 1 raised LookupError: .*, at The cell, line \d+, in train", headline)
    assert (job.status.state, job.status.errors) == ("finished", 1)
    line = render.text(render.JobSnapshot.of(job))
    assert "finished with 1 error · 1 rank" in line and f"warning: {headline[:100]}" in line
    display = SimpleNamespace(say=str, flush=list)
    assert exit_code(lambda: job, display) == 3
    with pytest.raises(ZeroDivisionError, match="The cell, line"):
        crew.fit(lambda: 1 / 0, np=1)


def without_figures():
    import nbelastic.torch as hvd
    from nbelastic.elastic.ranks import telemetry

    def broken(_):
        raise RuntimeError("no figures")

    take, telemetry.Telemetry.take = telemetry.Telemetry.take, broken
    try:
        hvd.init()
        hvd.barrier()
        return hvd.size()
    finally:
        telemetry.Telemetry.take = take


def test_what_others_wait_for_is_said_though_there_are_no_figures(crew):
    job = crew.fit(without_figures, np=2)
    assert job.results() == [2, 2]
    assert "formed" in kinds(job)


def talk_slowly(marks):
    import time
    from pathlib import Path

    print("early")
    while not (Path(marks) / "go").exists():
        time.sleep(0.02)
    print("late")


def test_output_can_be_followed_to_the_end(crew, tmp_path, capsys):
    job = crew.fit(talk_slowly, args=(str(tmp_path),), np=2, block=False)
    until(lambda: job.logs().count("early") == 2, "both have spoken")
    go = threading.Timer(0.5, (tmp_path / "go").touch)
    go.start()
    assert job.logs(follow=True) == ""
    printed = capsys.readouterr().out.splitlines()  # also what this test's cluster tells of a job
    assert [each for each in printed if each == "early"] == ["early", "early"]
    assert [each for each in printed if each == "late"] == ["late", "late"]
    job.logs(rank=1, follow=True)
    assert capsys.readouterr().out == "early\nlate\n"
    assert job.done()
