"""A wait in a plain terminal."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from nbelastic.notebook import wait_display
from nbelastic.notebook.wait_display import TerminalWaitDisplay
from nbelastic.render import Streamer

from .fakes import FakeJob


class Screen(io.StringIO):
    def __init__(self, tty: bool) -> None:
        super().__init__()
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


class Plain(Streamer):
    """Shows every output as it is."""

    def feed(self, outputs):
        return "".join(output.text for output in outputs)

    def flush(self):
        return ""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def out() -> Screen:
    return Screen(tty=True)


@pytest.fixture
def err(request, monkeypatch, out) -> Screen:
    screen = Screen(getattr(request, "param", True))
    monkeypatch.setattr(wait_display, "sys", SimpleNamespace(stdout=out, stderr=screen))
    return screen


def watch(job: FakeJob, quiet: bool = False) -> TerminalWaitDisplay:
    return TerminalWaitDisplay(job, Plain(), quiet, Clock())


def test_a_terminal_gets_one_line_that_is_rewritten(err):
    job = FakeJob()
    with watch(job) as looking:
        looking.tick()
        job.set(commits=121)
        looking.tick()
        job.end()
    said = err.getvalue()
    assert "\r\x1b[Kquickstart: running · 4 ranks · 120 commits" in said
    assert "\r\x1b[Kquickstart: running · 4 ranks · 121 commits" in said
    assert said.count("\n") == 1
    last = "nbelastic job quickstart: finished · 4 ranks · 2 resets · 121 commits\n"
    assert said.endswith("\r\x1b[K" + last)


def test_an_unchanged_line_is_not_written_again(err):
    with watch(FakeJob()) as looking:
        looking.tick()
        before = err.getvalue()
        looking.tick()
        assert err.getvalue() == before


def test_the_line_is_cut_to_the_terminal(err, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    with watch(FakeJob()) as looking:
        looking.tick()
        shown = err.getvalue().removeprefix("\r\x1b[K")
    assert len(shown) <= 19 and shown.endswith("…")


@pytest.mark.parametrize("err", [False], indirect=True)
def test_a_file_gets_only_the_last_line(err):
    job = FakeJob()
    with watch(job) as looking:
        looking.tick()
        job.end()
    assert err.getvalue() == (
        "nbelastic job quickstart: finished · 4 ranks · 2 resets · 120 commits\n"
    )


def test_output_goes_to_stdout_once_and_the_line_gives_way(err, out):
    job = FakeJob()
    with watch(job) as looking:
        looking.tick()
        job.prints("epoch 1\n")
        looking.tick()
        looking.tick()
        job.prints("epoch 2\n")
        job.end()
    assert out.getvalue() == "epoch 1\nepoch 2\n"
    assert "samples/s\r\x1b[K\r\x1b[Kquickstart" in err.getvalue()


def test_no_line_is_drawn_into_the_middle_of_a_line_of_output(err, out):
    job = FakeJob()
    with watch(job) as looking:
        job.prints("loss: ")
        looking.tick()
        assert err.getvalue() == ""
        job.end()
    assert out.getvalue() == "loss: \n"


def test_what_is_said_stands_on_a_line_of_its_own(err):
    with watch(FakeJob()) as looking:
        looking.tick()
        looking.say("stopping at the next commit")
    assert err.getvalue().endswith("\r\x1b[Kstopping at the next commit\n")


def test_quiet_means_output_only(err, out):
    job = FakeJob()
    with watch(job, quiet=True) as looking:
        job.prints("epoch 1\n")
        looking.tick()
        job.end()
    assert err.getvalue() == ""
    assert out.getvalue() == "epoch 1\n"


def test_a_wait_that_is_given_up_has_no_last_line(err):
    with watch(FakeJob()) as looking:
        looking.tick()
    assert "nbelastic job" not in err.getvalue()
    assert err.getvalue().endswith("\r\x1b[K")
