"""The view: frames, lines, prefixes, files and JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections import deque
from types import SimpleNamespace

import pytest
from rich.console import Console

from nbelastic.cli.display import CommandDisplay, JsonView, ViewOptions, WaitView
from nbelastic.cli.live import LiveView, frame
from nbelastic.cli.run import view_options
from nbelastic.render import FIGURES, JobSnapshot, line, page
from nbelastic.render.figures import Figure
from nbelastic.status import Progress
from tests.notebook.fakes import FakeJob, rank_status

from .stage import Terminal


def a_job() -> FakeJob:
    job = FakeJob(
        ranks=(*(rank_status(i) for i in range(3)), rank_status(None, state="starting")),
        size=3,
        progress=Progress(epoch=3, epochs=10, remaining_s=75.0),
    )
    job.curves = {"loss": [(1.0, 0.5), (2.0, 0.2134)]}
    job.happens("joined", 1.0, rank=2)
    job.happens("lost", 40.0, rank=3, detail="its process has ended")
    job.happens("formed", 40.1)
    return job


def rows(job: FakeJob, width: int, height: int = 24) -> list[str]:
    return [row.plain.rstrip() for row in frame(JobSnapshot.of(job), width, height)]


FRAMES = {
    80: """\
quickstart running · 3/8 ranks · epoch 3/10 (30%) · 0:42, 1:15 left
   0  10.0.0.0:40000   running   ███████████████████████ 10 commits  250/s
   1  10.0.0.1:40001   running   ███████████████████████ 10 commits  250/s
   2  10.0.0.2:40002   running   ███████████████████████ 10 commits  250/s
   –  10.0.0.99:40099  starting  ███████████████████████ 10 commits  250/s
  0:01 Rank 2 has joined
  0:40 Rank 3 is lost: its process has ended""",
}


@pytest.mark.parametrize("width", [1, 20, *FRAMES, 160])
def test_no_row_is_wider_than_the_terminal(width):
    found = rows(a_job(), width)
    assert "\n".join(found) == FRAMES.get(width, "\n".join(found))
    assert max(map(len, found)) <= width
    assert found[0].endswith(" · 1,000 samples/s · loss 0.2134 · 2 resets") == (width == 160)


def test_a_loop_without_epochs_and_samples_is_shown_in_steps():
    ranks = (dataclasses.replace(rank_status(0), samples_per_s=None, steps_per_s=2.5),)
    progress = Progress(epoch=0, epochs=0, step=1500, steps=6000, remaining_s=90.0)
    job = FakeJob(ranks=ranks, samples_per_s=None, progress=progress, size=1, max_np=1)
    assert not set("█░") & set("".join(rows(job, 120)))  # no bars without samples
    assert "1/1 rank · step 1,500/6,000 (25%) · 0:42, 1:30 left · 2.5 steps/s" in rows(job, 120)[0]
    assert "25% · 2.5 steps/s · 1:30 left" in line(JobSnapshot.of(job))


def test_many_ranks_are_cut_to_the_height():
    job = FakeJob(ranks=tuple(rank_status(i) for i in range(100)), size=100, max_np=None)
    found = rows(job, 80, 10)
    assert len(found) <= 10
    assert found[-1] == "  + 94 more"


def test_control_characters_of_events_and_reasons_do_not_reach_the_terminal():
    job = FakeJob(reason="waiting\x1b[2Jfor\n\x07more")
    job.happens("lost", 1.0, rank=1, detail=f"\x1b]0;title\x07 {'x' * 300} at train.py, line 7")
    assert not re.search("[\x00-\x1f\x7f]", "".join(rows(job, 160)))
    assert rows(job, 80)[-1].endswith("train.py, line 7")  # the end is not cut


# -- a pseudo-terminal ---------------------------------------------------------------------------


def streams(out, err=None) -> SimpleNamespace:
    return SimpleNamespace(stdout=out, stderr=err)


def live(job: FakeJob, terminal: Terminal) -> LiveView:
    console = Console(file=terminal.stream, highlight=False, markup=False, width=80)
    return LiveView(job, ViewOptions("live"), deque(), console=console)


@pytest.fixture
def terminal(monkeypatch):
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return Terminal(80)


def test_the_live_view_on_a_terminal(terminal, monkeypatch):
    for module in ("live", "display"):
        monkeypatch.setattr(f"nbelastic.cli.{module}.sys", streams(*[terminal.stream] * 2))
    job = a_job()
    with live(job, terminal) as view:
        view.tick()
        job.prints("epoch 1\n")
        view.tick()
        view.say("stopping at the next commit")
        job.end()
    text = terminal.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert plain.startswith(FRAMES[80].splitlines()[0])
    assert "epoch 1\n" in plain and "stopping at the next commit\n" in plain
    assert plain.index("epoch 1") < plain.rindex("Rank 3 is lost")
    assert plain.endswith("finished · 3 ranks · 2 resets · 120 commits\n")
    assert "quickstart finished" in plain  # the last frame stays
    assert "\x1b[?25h" in text  # the cursor is back


def test_the_cursor_is_back_also_when_the_last_look_fails(terminal, monkeypatch):
    job = a_job()
    with pytest.raises(ZeroDivisionError), live(job, terminal):
        monkeypatch.setattr(job, "output", lambda _: 1 / 0)
    assert "\x1b[?25h" in terminal.close()


# -- lines ---------------------------------------------------------------------------------------


def watch(kind, job, **options):
    return kind(job, ViewOptions(**options), deque())


def test_without_a_terminal_there_are_lines_and_no_control_characters(capsys):
    job = a_job()
    with watch(WaitView, job) as view:
        job.prints("epoch 1\nepo")
        job.prints("another\n", rank=1)
        view.tick()
        job.prints("ch 2\n")
        job.happens("left", 41.0, rank=1, detail="\x1b[31mred\x07")
        view.tick()
        job.history = job.history[:1]  # taken over again: it is the scheduler's now
        view.tick()
        job.prints("\rbar 50%\rbar 100%\nrest")
        job.end()
    out, err = capsys.readouterr()
    assert out == "epoch 1\nepoch 2\nbar 100%\nrest\n"
    assert err.splitlines() == [
        "0:01 Rank 2 has joined",
        "0:40 Rank 3 is lost: its process has ended",
        "0:41 Rank 1 has left: \N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}",
        "0:01 Rank 2 has joined",
        "nbelastic job quickstart: finished · 3 ranks · 2 resets · 120 commits",
    ]
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f]", out + err)


def test_json_is_an_object_in_each_line(capsys):
    with watch(JsonView, job := a_job()) as view:
        job.prints("a\n", rank=0)
        view.say("stopping")
        job.end()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["type"] for each in found] == ["message", "output", *["event"] * 3, "end"]
    assert found[1] == {"type": "output", "rank": 0, "text": "a"}
    assert found[3]["detail"] == "its process has ended"
    assert found[-1]["state"] == "finished"


def test_quiet_is_the_output_of_rank_0_alone_and_without_streams_nothing_fails(capsys, monkeypatch):
    def show() -> None:
        with watch(WaitView, job := a_job(), style="quiet") as view:
            job.prints("a\n")
            job.prints("b\n", rank=1)
            view.tick()
            job.end()

    show()
    assert capsys.readouterr() == ("a\n", "")
    for module in ("display", "run"):
        monkeypatch.setattr(f"nbelastic.cli.{module}.sys", streams(None))
    assert view_options({}).style == "plain"
    show()


@pytest.mark.parametrize("writable", [True, False])
def test_output_is_prefixed_and_written_to_files(tmp_path, capsys, writable):
    if not writable:
        (tmp_path / "out").write_text("a file")
    job = FakeJob()
    with watch(WaitView, job, prefix=True, directory=str(tmp_path / "out")) as view:
        job.prints("a\nb\n", rank=0)
        view.tick()
        job.prints("c\n", rank=1)
        job.prints("d\n", rank=0)
        job.end()
    out, err = capsys.readouterr()
    assert out == "[0]<stdout>: a\n[0]<stdout>: b\n[1]<stdout>: c\n[0]<stdout>: d\n"
    assert err.count("--output-filename") == (0 if writable else 1)  # once, and nothing fails
    if writable:
        assert (tmp_path / "out/rank.0/stdout").read_text() == "a\nb\nd\n"
        assert (tmp_path / "out/rank.1/stdout").read_text() == "c\n"


def test_messages_of_other_threads_and_hosts_are_shown_without_control_characters(capsys):
    display = CommandDisplay(ViewOptions())
    display.say("a\x1b[2J\nb")
    display.tell("hosts.sh failed: \x1b]0;title\x07")
    with display.watching(FakeJob()) as view:
        view.say("\x1b[31mred")
    display.tell("after the end")
    display.flush()
    shown = capsys.readouterr().err.replace("\N{REPLACEMENT CHARACTER}", "?").splitlines()
    assert shown == ["a?[2J", "b", "?[31mred", "hosts.sh failed: ?]0;title?", "after the end"]


@pytest.mark.parametrize(
    ("tty", "term", "given", "style"),
    [
        (True, "xterm", {}, "live"),
        (True, "dumb", {}, "plain"),  # it cannot move its cursor
        (False, "xterm", {}, "plain"),
        *((True, "xterm", {style: True}, style) for style in ("plain", "json", "quiet")),
    ],
)
def test_the_style_follows_options_and_terminal(tty, term, given, style, monkeypatch):
    stderr = SimpleNamespace(isatty=lambda: tty)
    monkeypatch.setattr("nbelastic.cli.run.sys", streams(None, stderr))
    monkeypatch.setenv("TERM", term)
    assert view_options(given).style == style


def test_a_reader_that_goes_away_stops_its_stream_alone(monkeypatch, capsys):
    """As ``| head`` does: events are shown on, and nothing fails at the end."""
    read, write = os.pipe()
    os.close(read)
    job = FakeJob()
    with open(write, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr("nbelastic.cli.display.sys", streams(pipe, sys.stderr))
        with watch(WaitView, job) as view:
            job.prints("a\n")
            view.tick()
            job.happens("lost", 40.0, rank=3, detail="its process has ended")
            job.prints("b\n")
            job.end()
    assert "Rank 3 is lost" in capsys.readouterr().err


def test_a_column_of_ones_own_is_in_the_panel_and_in_the_frame(request):
    mine = Figure("Host", lambda rank: rank.worker.split(":")[1], in_frame=lambda _: "mine")
    FIGURES.append(mine)
    request.addfinalizer(lambda: FIGURES.remove(mine))
    job = a_job()
    assert "mine" in rows(job, 100)[1]
    shown = page(JobSnapshot.of(job))
    assert "Host" in shown
    assert mine.cell(job.status.ranks[0]) in shown
