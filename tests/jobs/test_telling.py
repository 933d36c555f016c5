"""What ranks report and print reaches their owner, and what is displayed never harms a job."""

from __future__ import annotations

import contextlib
import re

import pytest

import nbelastic
from nbelastic.driver import display
from tests.support.clusters import kinds
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


def test_reports_are_means_by_place_each_once_though_a_rank_dies(crew, tmp_path):
    job = crew.fit(reporting, args=[6, tmp_path], np=4, min_np=2)
    assert "lost" in kinds(job)
    rows = job.metrics.to_dict("records")
    assert [row["place"] for row in rows] == [10 * e + b for e in range(6) for b in range(3)]
    assert [row["step"] for row in rows] == list(range(18))
    size = rows[-1]["size"]  # a newcomer may still join at the last commit
    assert (rows[-1]["ranks"], rows[-1]["rank"]) == (size, (size - 1) / 2)  # nothing is held back
    assert job.curves()["place"][0] == (0.0, 0.0)


def test_status_tells_steps_speed_device_and_progress(crew, tmp_path):
    (tmp_path / "killed").touch()
    job = crew.fit(reporting, args=[40, tmp_path], np=4, block=False)
    seen = []
    while not job.wait(0.05):
        seen.append(job.status)
    running = [status for status in seen if status.samples_per_s]
    assert running, "no speed was ever known"
    middle = running[len(running) // 2]
    assert 4 * 4 < middle.samples_per_s < 4 * 4 / 0.05
    assert {rank.device for rank in middle.ranks} == {"cpu"}
    assert all(rank.step > 0 for rank in middle.ranks)
    assert middle.progress.epochs == 40 and 0 < middle.progress.fraction < 1
    assert any(status.progress.remaining_s for status in running)
    assert job.pace()


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
    recoveries = [event.detail for event in told if "restored" in event.detail]
    assert len(recoveries) == 1
    phases = re.findall(r"([a-z]+) ([\d.]+)", recoveries[0])
    assert [name for name, _ in phases] == ["noticed", *PHASES]
    times = [float(time) for _, time in phases]
    assert times == sorted(times)
    sizes = {rank.state_bytes for status in seen for rank in status.ranks} - {0}
    assert len(sizes) <= 2 and max(sizes) > 1000  # without and with the optimizer's state


def test_output_comes_in_pieces_and_the_logs_hold_all_of_it(crew, tmp_path):
    (tmp_path / "killed").touch()
    job = crew.fit(reporting, args=[2, tmp_path], np=2, block=False)
    cursor, pieces = 0, []
    while not job.wait(0.05):
        cursor, new = job.output(cursor)
        pieces += new
    pieces += job.output(cursor)[1]
    lines = [f"at {e}.{b}" for e in range(2) for b in range(3)]
    for rank in range(2):
        text = "".join(piece.text for piece in pieces if piece.rank == rank)
        assert text.splitlines() == lines
        assert job.logs(rank) == text


class Recorder:
    """A display that notes how it is used, and can be made to fail."""

    def __init__(self, *, broken=False):
        self.calls = []
        self.broken = broken

    def _note(self, call):
        self.calls.append(call)
        if self.broken:
            raise RuntimeError("a fault of the display")

    def started(self, job):
        self._note(f"started {job.name}")

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
def set_display(monkeypatch):
    before = display._display
    monkeypatch.setattr(display, "_complained", False)
    yield display.set_display
    display.set_display(before)


def test_a_display_is_told_of_every_job_and_ticks_while_somebody_waits(crew, set_display):
    import time

    recorder = Recorder()
    set_display(recorder)
    job = nbelastic.fit(time.sleep, args=[0.5], cluster=crew.client, np=2, name="shown")
    assert recorder.calls[:2] == ["started shown", "watching shown"]
    assert recorder.calls.count("tick") >= 2
    assert recorder.calls[-1] == "left"
    job._ipython_display_()
    assert recorder.calls[-1] == "show shown"


def test_a_broken_display_is_complained_of_once_and_harms_nothing(crew, set_display, caplog):
    set_display(Recorder(broken=True))
    work = nbelastic.fit(nbelastic.size, cluster=crew.client, np=2)
    assert work.results() == [2, 2]
    assert nbelastic.fit(nbelastic.size, cluster=crew.client, np=2).results() == [2, 2]
    assert len([r for r in caplog.records if "display" in r.message]) == 1


def test_a_job_without_a_display_shows_itself_in_a_line(crew, set_display, capsys):
    set_display(None)
    job = crew.fit(nbelastic.size, np=2, name="plain")
    capsys.readouterr()
    job._ipython_display_()
    assert capsys.readouterr().out == "<Job plain: finished, 2 ranks, 0 commits>\n"


def test_errors_name_the_users_files_as_the_display_calls_them(crew, set_display):
    def fail():
        raise ArithmeticError("here")

    set_display(Recorder())
    with pytest.raises(ArithmeticError, match=r"The cell, line \d+, in fail"):
        crew.fit(fail, np=1)


def test_losses_and_sizes_are_in_the_history(crew, tmp_path):
    work = Workload(tmp_path, epochs=4, faults=(Fault(rank=1, epoch=1, batch=1),))
    job = crew.fit(work, np=4, min_np=2)
    check(job.results(), work)
    formed = [event.size for event in job.history if event.kind == "formed"]
    assert formed[:2] == [4, 3]


def without_figures():
    import nbelastic.torch as hvd
    from nbelastic.elastic import vitals

    def broken(_):
        raise RuntimeError("no figures")

    take, vitals.Vitals.take = vitals.Vitals.take, broken
    try:
        hvd.init()
        hvd.barrier()
        return hvd.size()
    finally:
        vitals.Vitals.take = take


def test_what_others_wait_for_is_said_though_there_are_no_figures(crew):
    job = crew.fit(without_figures, np=2)
    assert job.results() == [2, 2]
    assert "formed" in kinds(job)
