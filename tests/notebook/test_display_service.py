"""How a job is shown: as the value of a cell, while a cell or a terminal waits, and by name."""

import io
import itertools
import logging
import sys
import threading
from types import SimpleNamespace

import pytest

from nbelastic.driver import display as drivers
from nbelastic.notebook import display_service
from nbelastic.notebook.display_service import (
    WIDGET,
    DisplayGroup,
    OutputDisplay,
    Shown,
    bundle,
)
from nbelastic.render import Streamer
from tests.support.logs import own_records

from .fakes import LINE, Clock, FakeJob, Screen, until


def panel_threads() -> int:
    return sum(each.name == "nbelastic-panel-quickstart" for each in threading.enumerate())


# -- the value of a cell ---------------------------------------------------------------------------


def test_a_shown_job_has_three_representations_and_two_when_it_is_over(stage):
    job = FakeJob()
    stage.display.show(job)
    (shown,) = stage.screen.shown
    assert set(shown) == {WIDGET, "text/html", "text/plain"} and panel_threads() == 1
    assert "As of 0:42 after the start: the job went on." in shown["text/html"]
    (group,) = stage.groups()
    assert shown[WIDGET]["model_id"] == group._panel.widget.model_id
    job.happens("lost", 3, rank=1)
    until(lambda: "Rank 1 is lost" in group._panel._parts["live"].value)
    assert stage.screen.updates == []
    job.end()
    until(lambda: stage.screen.updates)
    (shown,) = stage.screen.shown
    assert shown == bundle(job) and set(shown) == {"text/html", "text/plain"}
    assert shown["text/plain"] == LINE and "went on" not in shown["text/html"]
    assert stage.screen.makers == [threading.main_thread()]
    until(lambda: not stage.groups())
    assert "finished" in group._panel._parts["head"].value  # which a reloaded page shows


def test_without_ipywidgets_there_are_two(stage, monkeypatch):
    monkeypatch.delitem(sys.modules, "nbelastic.notebook.panel", raising=False)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    job = FakeJob()
    stage.display.show(job)
    assert set(stage.screen.shown[0]) == {"text/html", "text/plain"}
    assert "pip install ipywidgets" in stage.screen.shown[0]["text/html"]
    job.set(commits=4_321)
    stage.clock.now += 5.0
    until(lambda: "4,321" in stage.screen.shown[0]["text/html"])
    job.end()
    until(lambda: "finished" in stage.screen.shown[0]["text/plain"])


def test_a_panel_whose_kernel_is_gone_says_what_becomes_of_the_job(stage):
    attach = "trains on: <code>nbelastic.attach(&#34;a&lt;b&#34;,"
    for elsewhere, words in ((True, attach), (False, "ends with its kernel")):
        job = FakeJob(name="a<b", elsewhere=elsewhere)
        stage.display.show(job)
        assert words in stage.groups()[-1]._panel._parts["head"].value
        job.end()


def test_a_job_shown_twice_has_one_thread_and_the_wait_for_it_ends_both_displays(stage):
    job = FakeJob()
    for cell in (1, 2):
        stage.shell.execution_count = cell
        stage.display.show(job)
    assert panel_threads() == 1
    assert stage.screen.shown[0][WIDGET] == stage.screen.shown[1][WIDGET]
    with stage.display.watching(job) as watch:
        stage.clock.now += 3.0
        watch.tick()
        job.end()
    assert stage.screen.shown == [bundle(job)] * 3


def test_the_static_page_is_updated_every_five_seconds_at_most():
    screen, clock, job = Screen(), Clock(), FakeJob(state="waiting")
    group = DisplayGroup(job, screen.publish, clock)
    group.publish()
    job.set(state="running")
    for later, updates in ((4.0, 0), (1.5, 1), (10.0, 1)):  # the widget shows what else changes
        clock.now += later
        group.refresh()
        assert len(screen.updates) == updates
    assert "running" in screen.shown[0]["text/html"] and WIDGET in screen.shown[0]
    job.end()
    group.join()
    assert len(screen.updates) == 2


# -- a cell that waits -----------------------------------------------------------------------------


def test_a_short_wait_shows_the_end_and_one_line_and_the_cell_shows_its_job_once(stage, capsys):
    job = FakeJob()
    with stage.display.watching(job) as watch:
        watch.tick()
        assert stage.screen.shown == []
        job.end()
        stage.clock.now += 3.0
        watch.tick()  # which has begun before the end
    stage.display.show(job)
    assert stage.screen.shown == [bundle(job)]
    assert capsys.readouterr().out == LINE + "\n"
    stage.shell.execution_count = 2
    stage.display.show(job)
    assert stage.screen.shown == [bundle(job)] * 2 and stage.groups() == []


@pytest.mark.parametrize("resets", [0, 1])
def test_the_panel_appears_late_or_with_a_reset_and_outlives_the_wait(stage, capsys, resets):
    job = FakeJob()
    with stage.display.watching(job) as watch:
        stage.clock.now += 1.9
        watch.tick()
        assert stage.screen.shown == []
        stage.clock.now += 0.0 if resets else 0.2
        job.set(resets=2 + resets)
        watch.tick()
        watch.tick()
        assert len(stage.screen.shown) == 1 and WIDGET in stage.screen.shown[0]
        job.happens("lost", 3, rank=2)
        job.prints("epoch 1\n")
        watch.tick()
        (group,) = stage.groups()
        until(lambda: "Rank 2 is lost" in group._panel._parts["live"].value)
    with stage.display.watching(job):
        job.prints("epoch 2\n")
        job.end()
    said = LINE.replace("2 resets", f"{2 + resets} resets")
    assert capsys.readouterr().out == f"epoch 1\nepoch 2\n{said}\n"  # each line once
    assert stage.screen.shown == [bundle(job)] * 2


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


@pytest.mark.parametrize("part", ["output", "history"])
def test_a_fault_of_a_display_is_logged_once_and_harms_no_job(stage, caplog, monkeypatch, part):
    monkeypatch.setattr(drivers, "_display", stage.display)
    drivers._complain.cache_clear()
    job = FakeJob()
    with caplog.at_level(logging.WARNING), drivers.watching(job) as watch:
        setattr(job, part, None)
        stage.clock.now += 3.0
        watch.tick()
        watch.tick()
        job.end()
    assert len(own_records(caplog)) == 1


def test_another_thread_than_the_main_one_waits_in_silence(stage, capsys, monkeypatch):
    monkeypatch.setattr(drivers, "_display", stage.display)
    job = FakeJob()

    def wait():
        with drivers.watching(job) as watch:
            stage.clock.now += 3.0
            watch.tick()
            watch.say("stopping")
            stage.display.say("connecting")
            job.end()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(10)
    assert stage.screen.shown == [] and capsys.readouterr().out == ""


# -- without a notebook ----------------------------------------------------------------------------


def test_noninteractive_leaves_only_the_last_line(stage, capsys, monkeypatch):
    monkeypatch.setenv("NBELASTIC_NONINTERACTIVE", "1")
    job = FakeJob()
    stage.display.say("connecting")
    with stage.display.watching(job) as watch:
        stage.clock.now += 3.0
        job.prints("epoch 1\n")
        watch.tick()
        job.end()
    stage.display.show(job)
    assert stage.screen.shown == []  # the cell has waited for it
    assert capsys.readouterr() == (LINE + "\n", "")
    stage.shell.execution_count = 2
    stage.display.show(job)
    assert stage.screen.shown == [{"text/plain": LINE}]


def test_without_a_kernel_lines_go_to_stderr_and_a_job_to_stdout(stage, capsys):
    stage.display.say("connecting")
    assert capsys.readouterr() == ("connecting\n", "")
    stage.shell = None
    stage.display.say("connecting")
    job = FakeJob()
    job.prints("epoch 1\n")
    with stage.display.watching(job) as watch:
        watch.tick()
        job.end()
    stage.display.show(job)
    assert capsys.readouterr() == (f"epoch 1\n{LINE}\n", f"connecting\n{LINE}\n")
    assert stage.screen.shown == []


def test_a_file_that_is_a_cell_is_called_as_ipython_calls_it(stage, shell):
    stage.shell = shell
    cell = shell.compile.cache("1 / 0", 7)
    assert stage.display.label(cell) == "Cell In[7]"
    assert stage.display.label(__file__) is None


# -- in a terminal --------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def err(monkeypatch):
    streams = SimpleNamespace(stdout=Terminal(), stderr=Terminal())
    monkeypatch.setattr(display_service, "sys", streams)
    return streams.stderr


def watch(job: FakeJob, quiet: bool = False) -> OutputDisplay:
    return OutputDisplay(job, Shown(Streamer(), quiet), itertools.count(1.0).__next__)


def test_a_terminal_gets_one_line_that_is_rewritten(err):
    job = FakeJob()
    with watch(job) as looking:
        looking.tick()
        before = err.getvalue()
        looking.tick()
        assert err.getvalue() == before
        job.set(commits=121)
        looking.tick()
        job.end()
    said = err.getvalue()
    assert "\r\x1b[Kquickstart: running · 4 ranks · 120 commits" in said
    assert "\r\x1b[Kquickstart: running · 4 ranks · 121 commits" in said
    assert said.count("\n") == 1
    assert said.endswith("\r\x1b[K" + LINE.replace("120", "121") + "\n")
    with watch(job, quiet=True) as looking:
        looking.tick()
    assert err.getvalue() == said


def test_the_line_is_cut_to_the_terminal_and_gives_way_to_what_is_said(err, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    with watch(FakeJob()) as looking:
        looking.tick()
        shown = err.getvalue().removeprefix("\r\x1b[K")
        looking.say("stopping at the next commit")
    assert len(shown) <= 19 and shown.endswith("…")
    assert err.getvalue().endswith("\r\x1b[Kstopping at the next commit\n")  # and no last line


def test_the_line_gives_way_to_output_and_is_not_drawn_into_its_middle(err):
    job = FakeJob()
    with watch(job) as looking:
        job.prints("\repoch 1")
        looking.tick()
        assert err.getvalue() == ""
        job.prints("\n")
        looking.tick()
        looking.tick()
        job.prints("epoch 2")
        job.end()
    assert display_service.sys.stdout.getvalue() == "\repoch 1\repoch 1\nepoch 2\n"
    assert err.getvalue().endswith(f"samples/s\r\x1b[K{LINE}\n")
