"""What is shown while a cell, or a terminal, waits for a job."""

from __future__ import annotations

import logging
import threading

import pytest

from nbelastic.driver import display as drivers
from nbelastic.notebook.display_group import WIDGET
from nbelastic.notebook.display_service import bundle
from tests.support.logs import own_records

from .fakes import FakeJob
from .stage import until

LINE = "nbelastic job quickstart: finished · 4 ranks · 2 resets · 120 commits"

# -- a cell that waits -----------------------------------------------------------------------------


def test_a_short_wait_shows_the_end_and_one_line(stage, capsys):
    job = FakeJob()
    with stage.display.watching(job) as watch:
        watch.tick()
        assert stage.screen.shown == []
        job.end()
    assert stage.screen.shown == [bundle(job)]
    assert capsys.readouterr().out == LINE + "\n"
    assert stage.display._groups == {}


def test_the_panel_appears_after_two_seconds(stage):
    job = FakeJob()
    with stage.display.watching(job) as watch:
        stage.clock.now += 1.9
        watch.tick()
        assert stage.screen.shown == []
        stage.clock.now += 0.2
        watch.tick()
        watch.tick()
        assert len(stage.screen.shown) == 1 and WIDGET in stage.screen.shown[0]

        assert not any(t.name.startswith("nbelastic-panel") for t in threading.enumerate())
        job.end()
    assert stage.screen.shown == [bundle(job)]


def test_the_panel_appears_at_once_with_a_reset(stage):
    job = FakeJob(resets=0)
    with stage.display.watching(job) as watch:
        watch.tick()
        job.set(resets=1)
        watch.tick()
        assert len(stage.screen.shown) == 1
        job.end()


def test_ticks_refresh_the_panel_in_the_main_thread(stage):
    job = FakeJob()
    with stage.display.watching(job) as watch:
        stage.clock.now += 3.0
        watch.tick()
        job.happens("lost", 3, rank=2)
        watch.tick()
        (group,) = stage.display._groups.values()
        assert "Rank 2 is lost" in group._panel._parts["live"].value
        job.end()


def test_output_is_written_as_it_comes_and_before_the_last_line(stage, capsys):
    job = FakeJob()
    with stage.display.watching(job) as watch:
        job.prints("epoch 1\n")
        watch.tick()
        job.prints("epoch 2\n")
        job.end()
    said = capsys.readouterr().out
    assert said.count("epoch 1") == said.count("epoch 2") == 1
    assert said.index("epoch 1") < said.index("epoch 2") < said.index(LINE)


def test_a_second_wait_does_not_repeat_the_output_of_the_first(stage, capsys):
    job = FakeJob()
    job.prints("epoch 1\n")
    with stage.display.watching(job) as watch:
        watch.tick()
    job.prints("epoch 2\n")
    with stage.display.watching(job) as watch:
        watch.tick()
        job.end()
    assert capsys.readouterr().out.count("epoch 1") == 1


def test_options_set_for_a_job_hold(stage, capsys):
    job = FakeJob()
    job.prints("epoch 1\n")
    stage.display.set_options(job, "none", quiet=True)
    with stage.display.watching(job) as watch:
        stage.clock.now += 3.0
        watch.tick()
        job.end()
    assert stage.screen.shown == []
    assert capsys.readouterr().out == ""


def test_a_wait_that_is_given_up_leaves_a_panel_that_lives_on(stage, capsys):
    job = FakeJob()
    with stage.display.watching(job) as watch:
        stage.clock.now += 3.0
        watch.tick()
    assert capsys.readouterr().out == ""
    job.end()
    until(lambda: stage.screen.updates)
    assert stage.screen.shown == [bundle(job)]


def test_a_wait_for_a_job_shown_before_ends_both_displays(stage):
    job = FakeJob()
    stage.display.show(job)
    stage.shell.execution_count = 2
    with stage.display.watching(job) as watch:
        stage.clock.now += 3.0
        watch.tick()
        job.end()
    assert stage.screen.shown == [bundle(job)] * 2


def test_the_cell_that_waited_shows_its_job_once(stage):
    job = FakeJob()
    with stage.display.watching(job):
        job.end()
    stage.display.show(job)
    assert len(stage.screen.shown) == 1
    stage.shell.execution_count = 2
    stage.display.show(job)
    assert len(stage.screen.shown) == 2


def test_a_fault_while_waiting_is_logged_once_and_harms_no_job(stage, caplog, monkeypatch):
    monkeypatch.setattr(drivers, "_display", stage.display)
    monkeypatch.setattr(drivers, "_complained", False)
    job = FakeJob()
    job.output = None
    with caplog.at_level(logging.WARNING), drivers.watching(job) as watch:
        watch.tick()
        watch.tick()
        job.end()
    assert len(own_records(caplog)) == 1


def test_an_interrupt_goes_through(stage, monkeypatch):
    job = FakeJob()

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "output", interrupt)
    with pytest.raises(KeyboardInterrupt), stage.display.watching(job) as watch:
        watch.tick()


def test_another_thread_than_the_main_one_waits_in_silence(stage, capsys, monkeypatch):
    monkeypatch.setattr(drivers, "_display", stage.display)
    job = FakeJob()

    def wait():
        with drivers.watching(job) as watch:
            stage.clock.now += 3.0
            watch.tick()
            watch.say("stopping")
            job.end()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(10)
    assert stage.screen.shown == [] and capsys.readouterr().out == ""


# -- without a notebook ----------------------------------------------------------------------------


def test_noninteractive_leaves_only_the_last_line(stage, capsys, monkeypatch):
    monkeypatch.setenv("NBELASTIC_NONINTERACTIVE", "1")
    job = FakeJob()
    with stage.display.watching(job) as watch:
        stage.clock.now += 3.0
        job.prints("epoch 1\n")
        watch.tick()
        job.end()
    stage.display.show(job)
    assert stage.screen.shown == []
    assert capsys.readouterr() == (LINE + "\n", "")


def test_noninteractive_shows_a_job_as_its_line(stage, monkeypatch):
    monkeypatch.setenv("NBELASTIC_NONINTERACTIVE", "1")
    job = FakeJob()
    job.end()
    stage.display.show(job)
    assert stage.screen.shown == [{"text/plain": LINE}]


def test_without_a_kernel_a_wait_is_a_line_on_stderr(stage, capsys):
    stage.shell = None
    job = FakeJob()
    job.prints("epoch 1\n")
    with stage.display.watching(job) as watch:
        watch.tick()
        job.end()
    assert capsys.readouterr() == ("epoch 1\n", LINE + "\n")
    assert stage.screen.shown == []


def test_without_a_kernel_a_job_is_one_line_of_text(stage, capsys):
    stage.shell = None
    stage.display.show(FakeJob())
    assert capsys.readouterr().out == "nbelastic job quickstart: under way · 2 to 8 ranks\n"
