from __future__ import annotations

import logging
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from nbelastic.notebook import show as showing
from nbelastic.notebook.show import Manner, NotebookDisplay, bundle, kernel_shell
from nbelastic.notebook.view import WIDGET, View

from .fakes import FakeJob

LINE = "nbelastic job quickstart: finished · 4 ranks · 2 resets · 120 commits"


class Screen:
    """Keeps the latest of every display, and counts."""

    def __init__(self) -> None:
        self.displays: dict[str, dict] = {}
        self.updates: list[dict] = []
        self.makers: list[threading.Thread] = []

    def publish(self, data, display_id):
        assert display_id not in self.displays
        self.displays[display_id] = data
        self.makers.append(threading.current_thread())

    def update(self, data, display_id):
        assert display_id in self.displays
        self.displays[display_id] = data
        self.updates.append(data)

    @property
    def shown(self) -> list[dict]:
        return list(self.displays.values())


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """A display without a kernel, whose time and cell the test sets."""

    def __init__(self) -> None:
        self.screen, self.clock = Screen(), Clock()
        self.shell = SimpleNamespace(kernel=object(), execution_count=1)
        self.display = NotebookDisplay(self.screen, lambda: self.shell, self.clock)


@pytest.fixture
def stage():
    stage = Stage()
    yield stage
    stage.display.close()
    left = [t.name for t in threading.enumerate() if t.name.startswith("nbelastic-panel")]
    assert left == []


def until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.005)


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
    until(lambda: not stage.display._views)


def test_the_thread_keeps_the_widget_up_to_date(stage):
    job = FakeJob()
    stage.display.show(job)
    (view,) = stage.display._views.values()
    job.happens("lost", 3, rank=1)
    until(lambda: "Rank 1 is lost" in view._panel._parts["live"].value)
    assert stage.screen.updates == []
    job.end()
    until(lambda: not stage.display._views)


def test_displays_are_only_made_in_the_thread_that_asks(stage):
    job = FakeJob()
    stage.display.show(job)
    job.end()
    until(lambda: stage.screen.updates)
    assert stage.screen.makers == [threading.main_thread()]


def test_a_job_shown_twice_has_one_thread_and_both_displays_end_well(stage):
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
    assert stage.display._views == {}


def test_the_static_page_follows_the_state_but_not_more_often_than_every_five_seconds():
    screen, clock, job = Screen(), Clock(), FakeJob(state="waiting")
    view = View(job, screen, clock)
    view.publish()
    job.set(state="running")
    clock.now += 4.0
    view.refresh()
    assert screen.updates == []
    clock.now += 1.5
    view.refresh()
    job.set(commits=400)
    clock.now += 10.0
    view.refresh()
    assert len(screen.updates) == 1
    assert "running" in screen.shown[0]["text/html"] and WIDGET in screen.shown[0]
    job.end()
    view.finish()
    view.finish()
    assert len(screen.updates) == 2


def test_closing_ends_the_threads_of_jobs_that_go_on(stage):
    stage.display.show(FakeJob())
    stage.display.close()
    assert "nbelastic-panel-quickstart" not in [t.name for t in threading.enumerate()]
    assert stage.screen.updates == []


def test_a_screen_that_fails_is_logged_once_and_left_alone(stage, monkeypatch, caplog):
    def fail(*_):
        raise OSError("no kernel")

    monkeypatch.setattr(stage.screen, "publish", fail)
    job = FakeJob()
    with caplog.at_level(logging.WARNING):
        stage.display.show(job)
        until(lambda: not stage.display._views)
    assert len(caplog.records) == 1


# -- a cell that waits -----------------------------------------------------------------------------


def test_a_short_wait_shows_the_end_and_one_line(stage, capsys):
    job = FakeJob()
    with stage.display.watching(job) as watch:
        watch.tick()
        assert stage.screen.shown == []
        job.end()
    assert stage.screen.shown == [bundle(job)]
    assert capsys.readouterr().out == LINE + "\n"
    assert stage.display._views == {}


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
        (view,) = stage.display._views.values()
        assert "Rank 2 is lost" in view._panel._parts["live"].value
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


def test_the_manner_set_for_a_name_is_kept_to(stage, capsys):
    job = FakeJob()
    job.prints("epoch 1\n")
    stage.display.set_manner("quickstart", Manner(stream="none", quiet=True, panel=False))
    with stage.display.watching(job) as watch:
        stage.clock.now += 3.0
        watch.tick()
        job.end()
    assert stage.screen.shown == []
    assert capsys.readouterr().out == ""


def test_manners_do_not_pile_up(stage):
    for i in range(1_000):
        stage.display.set_manner(f"job{i}", Manner())
    assert len(stage.display._manners) == showing.MOST_MANNERS
    assert "job999" in stage.display._manners


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


def test_the_cell_that_waited_does_not_show_its_job_a_second_time(stage):
    job = FakeJob()
    with stage.display.watching(job):
        job.end()
    stage.display.show(job)
    assert len(stage.screen.shown) == 1
    stage.shell.execution_count = 2
    stage.display.show(job)
    assert len(stage.screen.shown) == 2


def test_a_fault_while_waiting_is_logged_once_and_harms_nobody(stage, caplog):
    job = FakeJob()
    job.output = None
    with caplog.at_level(logging.WARNING), stage.display.watching(job) as watch:
        watch.tick()
        watch.tick()
        job.end()
    assert len(caplog.records) == 1


def test_an_interrupt_goes_through(stage, monkeypatch):
    job = FakeJob()

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "output", interrupt)
    with pytest.raises(KeyboardInterrupt), stage.display.watching(job) as watch:
        watch.tick()


def test_another_thread_than_the_main_one_waits_in_silence(stage, capsys):
    job = FakeJob()

    def wait():
        with stage.display.watching(job) as watch:
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


def test_the_module_itself_is_a_display():
    for name in ("started", "watching", "show"):
        assert callable(getattr(showing, name))


# -- names of cells --------------------------------------------------------------------------------


def test_a_file_that_is_a_cell_is_called_as_ipython_calls_it(stage, shell):
    stage.shell = shell
    cell = shell.compile.cache("1 / 0", 7)
    assert stage.display.label(cell) == "Cell In[7]"
    assert stage.display.label(__file__) is None
    stage.shell = None
    assert stage.display.label(cell) is None
