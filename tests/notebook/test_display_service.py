"""How a job is shown: as the value of a cell, and by name."""

from __future__ import annotations

import logging
import sys
import threading
from types import SimpleNamespace

import pytest

from nbelastic.notebook.display_group import WIDGET, DisplayGroup
from nbelastic.notebook.display_service import bundle, kernel_shell
from tests.support.logs import own_records

from .fakes import FakeJob
from .stage import Clock, Screen, until

LINE = "nbelastic job quickstart: finished · 4 ranks · 2 resets · 120 commits"

# -- representations -------------------------------------------------------------------------------


def test_a_job_that_goes_on_has_three_representations():
    from nbelastic.notebook.panel import Panel

    job = FakeJob()
    panel = Panel(job)
    data = bundle(job, panel)
    assert set(data) == {WIDGET, "text/html", "text/plain"}
    assert data[WIDGET]["model_id"] == panel.widget.model_id
    assert "As of 0:42 after the start: the job went on." in data["text/html"]


def test_a_job_that_is_over_has_no_widget():
    from nbelastic.notebook.panel import Panel

    job = FakeJob()
    panel = Panel(job)
    job.end()
    data = bundle(job, panel)
    assert set(data) == {"text/html", "text/plain"}
    assert data["text/plain"] == LINE
    assert "went on" not in data["text/html"]


def test_without_ipywidgets_there_are_two(stage, monkeypatch):
    monkeypatch.delitem(sys.modules, "nbelastic.notebook.panel", raising=False)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    job = FakeJob()
    stage.display.show(job)
    assert set(stage.screen.shown[0]) == {"text/html", "text/plain"}
    job.end()
    until(lambda: "finished" in stage.screen.shown[0]["text/plain"])


# -- a job as the value of a cell ------------------------------------------------------------------


def test_a_shown_job_is_followed_by_a_thread_that_ends_with_it(stage):
    job = FakeJob()
    stage.display.show(job)
    assert WIDGET in stage.screen.shown[0]
    assert "nbelastic-panel-quickstart" in [t.name for t in threading.enumerate()]
    job.end()
    until(lambda: stage.screen.updates)
    assert stage.screen.shown == [bundle(job)]
    until(lambda: not stage.display._groups)


def test_the_thread_keeps_the_widget_up_to_date(stage):
    job = FakeJob()
    stage.display.show(job)
    (group,) = stage.display._groups.values()
    job.happens("lost", 3, rank=1)
    until(lambda: "Rank 1 is lost" in group._panel._parts["live"].value)
    assert stage.screen.updates == []
    job.end()
    until(lambda: not stage.display._groups)


@pytest.mark.parametrize(
    ("elsewhere", "words"),
    [
        (True, "trains on: <code>nbelastic.attach(&#34;a&lt;b&#34;,"),
        (False, "ends with its kernel"),
    ],
)
def test_a_line_under_the_widget_says_what_becomes_of_the_job(stage, elsewhere, words):
    job = FakeJob(name="a<b", elsewhere=elsewhere)
    stage.display.show(job)
    (line,) = stage.screen.after.values()
    assert words in line
    assert words in next(iter(stage.display._groups.values()))._panel._parts["head"].value
    job.end()
    until(lambda: list(stage.screen.after.values()) == [""])


def test_displays_are_only_made_in_the_thread_that_asks(stage):
    job = FakeJob()
    stage.display.show(job)
    job.end()
    until(lambda: stage.screen.updates)
    assert stage.screen.makers == [threading.main_thread()]


def test_a_job_shown_twice_has_one_thread_and_two_final_displays(stage):
    job = FakeJob()
    stage.display.show(job)
    stage.shell.execution_count = 2
    stage.display.show(job)
    names = [t.name for t in threading.enumerate()]
    assert names.count("nbelastic-panel-quickstart") == 1
    assert stage.screen.shown[0][WIDGET] == stage.screen.shown[1][WIDGET]
    job.end()
    until(lambda: len(stage.screen.updates) == 2)
    assert stage.screen.shown == [bundle(job)] * 2


def test_a_job_that_is_over_is_shown_without_a_thread(stage):
    job = FakeJob()
    job.end()
    stage.display.show(job)
    assert stage.screen.shown == [bundle(job)]
    assert stage.display._groups == {}


def test_the_static_page_is_updated_every_five_seconds_at_most():
    screen, clock, job = Screen(), Clock(), FakeJob(state="waiting")
    group = DisplayGroup(job, screen.publish, clock)
    group.publish()
    job.set(state="running")
    clock.now += 4.0
    group.refresh()
    assert screen.updates == []
    clock.now += 1.5
    group.refresh()
    job.set(commits=400)
    clock.now += 10.0
    group.refresh()
    assert len(screen.updates) == 1
    assert "running" in screen.shown[0]["text/html"] and WIDGET in screen.shown[0]
    job.end()
    group.finish()
    group.finish()
    assert len(screen.updates) == 2


def test_closing_ends_the_threads_of_jobs_that_go_on(stage):
    stage.display.show(FakeJob())
    stage.display.close()
    assert "nbelastic-panel-quickstart" not in [t.name for t in threading.enumerate()]
    assert stage.screen.updates == []


def test_a_screen_that_fails_is_logged_once_and_left_alone(stage, monkeypatch, caplog):
    def fail(*_, **__):
        raise OSError("no kernel")

    monkeypatch.setattr(stage.display, "_publish", fail)
    job = FakeJob()
    with caplog.at_level(logging.WARNING):
        stage.display.show(job)
        until(lambda: not stage.display._groups)
    assert len(own_records(caplog)) == 1


def test_a_kernel_is_found_only_where_ipython_runs_in_one(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert kernel_shell() is None
    assert "IPython" not in sys.modules
    for shell in (None, SimpleNamespace(), SimpleNamespace(kernel=None)):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda s=shell: s))
        assert kernel_shell() is None
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert kernel_shell() is shell


# -- names of cells --------------------------------------------------------------------------------


def test_a_file_that_is_a_cell_is_called_as_ipython_calls_it(stage, shell):
    stage.shell = shell
    cell = shell.compile.cache("1 / 0", 7)
    assert stage.display.label(cell) == "Cell In[7]"
    assert stage.display.label(__file__) is None
    stage.shell = None
    assert stage.display.label(cell) is None


# -- lines that belong to no job -------------------------------------------------------------------


def test_a_line_without_a_job_goes_to_the_cell(stage, capsys):
    stage.display.say("connecting to tcp://10.0.0.5:8786")
    assert capsys.readouterr().out == "connecting to tcp://10.0.0.5:8786\n"


def test_a_line_without_a_job_goes_to_stderr_in_a_terminal(stage, capsys):
    stage.shell = None
    stage.display.say("connecting")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "connecting\n")


def test_other_threads_and_noninteractive_runs_print_no_line(stage, capsys, monkeypatch):
    thread = threading.Thread(target=stage.display.say, args=("connecting",))
    thread.start()
    thread.join()
    monkeypatch.setenv("NBELASTIC_NONINTERACTIVE", "1")
    stage.display.say("connecting")
    assert capsys.readouterr() == ("", "")
