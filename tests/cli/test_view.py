"""The view: frames, lines, prefixes, files and JSON."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pty
import queue
import re
import struct
import sys
import termios
import threading

import pytest
from rich.console import Console

from nbelastic.cli.run import view_options
from nbelastic.cli.view import CommandDisplay, ViewOptions
from nbelastic.cli.view.display import JsonView, WaitView
from nbelastic.cli.view.live import LiveView, frame
from nbelastic.driver.status import Progress
from nbelastic.render import FIGURES, JobSnapshot, line, page
from nbelastic.render.figures import Figure
from tests.notebook.fakes import FakeJob, rank_status


def a_job() -> FakeJob:
    job = FakeJob(
        ranks=(*(rank_status(i) for i in range(3)), rank_status(None, state="starting")),
        size=3,
        progress=Progress(epoch=3, epochs=10, remaining_s=75.0),
    )
    job.shapes = {"loss": [(1.0, 0.5), (2.0, 0.2134)]}
    job.happens("joined", 1.0, rank=2)
    job.happens("lost", 40.0, rank=3, detail="its process has ended")
    job.happens("formed", 40.1)
    return job


def rows(job: FakeJob, width: int, height: int = 24) -> list[str]:
    found = frame(JobSnapshot.of(job), width, height)
    return ["".join(text for text, _ in row).rstrip() for row in found]


FRAMES = {
    80: """\
quickstart running · 3/8 ranks · epoch 3/10 (30%) · 0:42, 1:15 left
   0  10.0.0.0:40000   running   ███████████████████████ 10 commits  250/s
   1  10.0.0.1:40001   running   ███████████████████████ 10 commits  250/s
   2  10.0.0.2:40002   running   ███████████████████████ 10 commits  250/s
   –  10.0.0.99:40099  starting  ███████████████████████ 10 commits  250/s
  0:01 Rank 2 has joined
  0:40 Rank 3 is lost: its process has ended""",
    160: """\
quickstart running · 3/8 ranks · epoch 3/10 (30%) · 0:42, 1:15 left · 1,000 samples/s · \
loss 0.2134 · 2 resets
   0  10.0.0.0:40000   running   ████████████████████████████████████████ 10 commits  250/s
   1  10.0.0.1:40001   running   ████████████████████████████████████████ 10 commits  250/s
   2  10.0.0.2:40002   running   ████████████████████████████████████████ 10 commits  250/s
   –  10.0.0.99:40099  starting  ████████████████████████████████████████ 10 commits  250/s
  0:01 Rank 2 has joined
  0:40 Rank 3 is lost: its process has ended""",
}


@pytest.mark.parametrize("width", FRAMES)
def test_a_frame_at_its_width(width):
    assert "\n".join(rows(a_job(), width)) == FRAMES[width]


@pytest.mark.parametrize("width", [1, 20, 40, 79, 200])
def test_no_row_is_wider_than_the_terminal(width):
    assert max(map(len, rows(a_job(), width))) <= width


def test_without_a_pace_there_are_no_bars():
    job = FakeJob(ranks=(dataclasses.replace(rank_status(0), samples_per_s=None),))
    assert not set("█░") & set("".join(rows(job, 120)))


def test_a_loop_without_epochs_and_samples_is_shown_in_steps():
    ranks = (dataclasses.replace(rank_status(0), samples_per_s=None, steps_per_s=2.5),)
    progress = Progress(epoch=0, epochs=0, step=1500, steps=6000, remaining_s=90.0)
    job = FakeJob(ranks=ranks, samples_per_s=None, progress=progress)
    assert "step 1,500/6,000 (25%) · 0:42, 1:30 left · 2.5 steps/s" in rows(job, 120)[0]
    assert "25% · 2.5 steps/s · 1:30 left" in line(JobSnapshot.of(job))


def test_the_end_of_an_event_is_not_cut():
    job = FakeJob()
    job.happens("lost", 1.0, rank=1, detail=f"{'x' * 300} raised at train.py, line 7")
    assert rows(job, 80)[-1].endswith("train.py, line 7")


def test_a_newcomer_has_no_commits_of_its_own():
    job = FakeJob(ranks=(dataclasses.replace(rank_status(None), commits=0, step=3),))
    assert "– 250/s" in " ".join(rows(job, 80)[1].split())


def test_workers_that_differ_at_the_ends_of_their_names_look_different():
    names = [f"dask-jobqueue-SLURMCluster-gpu-node0123-{end}" for end in ("17", "18")]
    ranks = tuple(dataclasses.replace(rank_status(i), name=name) for i, name in enumerate(names))
    one, other = rows(FakeJob(ranks=ranks), 60)[1:3]
    assert one[4:] != other[4:]


def test_many_ranks_are_cut_to_the_height():
    job = FakeJob(ranks=tuple(rank_status(i) for i in range(100)), size=100, max_np=None)
    found = rows(job, 80, 10)
    assert len(found) <= 10
    assert found[-1] == "  + 94 more"


def test_control_characters_of_events_and_reasons_do_not_reach_the_terminal():
    job = FakeJob(reason="waiting\x1b[2Jfor\n\x07more")
    job.happens("lost", 1.0, rank=1, detail="\x1b]0;title\x07 gone")
    assert not re.search("[\x00-\x1f\x7f]", "".join(rows(job, 160)))


# -- a pseudo-terminal ---------------------------------------------------------------------------


class Terminal:
    """A pseudo-terminal of a width; what is written to it can be read at the end."""

    def __init__(self, width: int) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        self.stream = open(slave, "w", encoding="utf-8")  # noqa: SIM115
        self._read: list[bytes] = []
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other end is closed
                return
            self._read.append(data)

    def close(self) -> str:
        self.stream.close()
        self._thread.join()
        os.close(self._master)
        return b"".join(self._read).decode().replace("\r\n", "\n")


def show(job: FakeJob, width: int, monkeypatch) -> str:
    """Return what a live view of a job that ends writes to a terminal."""
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(width)
    monkeypatch.setattr("nbelastic.cli.view.live.sys", Streams(terminal.stream))
    monkeypatch.setattr("nbelastic.cli.view.display.sys", Streams(terminal.stream))
    console = Console(file=terminal.stream, highlight=False, markup=False, width=width)
    with LiveView(job, ViewOptions("live"), queue.SimpleQueue(), console=console) as view:
        view.tick()
        job.prints("epoch 1\n")
        view.tick()
        view.say("stopping at the next commit")
        job.end()
    return terminal.close()


class Streams:
    def __init__(self, stream) -> None:
        self.stdout = self.stderr = stream


@pytest.mark.parametrize("width", FRAMES)
def test_the_live_view_on_a_terminal(width, monkeypatch):
    text = show(a_job(), width, monkeypatch)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert plain.startswith(FRAMES[width].splitlines()[0])
    assert "epoch 1\n" in plain and "stopping at the next commit\n" in plain
    assert plain.index("epoch 1") < plain.rindex("Rank 3 is lost")
    assert plain.endswith("finished · 3 ranks · 2 resets · 120 commits\n")
    assert "quickstart finished" in plain  # the last frame stays
    assert "\x1b[?25h" in text  # the cursor is back


# -- lines ---------------------------------------------------------------------------------------


def watch(kind, job, **options):
    return kind(job, ViewOptions(**options), queue.SimpleQueue())


def test_without_a_terminal_there_are_lines_and_no_control_characters(capsys):
    job = a_job()
    with watch(WaitView, job) as view:
        job.prints("epoch 1\nepo")
        job.prints("another\n", rank=1)
        view.tick()
        job.prints("ch 2\n")
        job.happens("left", 41.0, rank=1, detail="\x1b[31mred\x07")
        view.tick()
        job.prints("\rbar 50%\rbar 100%\nrest")
        job.end()
    out, err = capsys.readouterr()
    assert out == "epoch 1\nepoch 2\nbar 100%\nrest\n"
    assert err.splitlines() == [
        "0:01 Rank 2 has joined",
        "0:40 Rank 3 is lost: its process has ended",
        "0:41 Rank 1 has left: \N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}",
        "nbelastic job quickstart: finished · 3 ranks · 2 resets · 120 commits",
    ]
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f]", out + err)


def test_prefixes_name_the_rank_of_each_line(capsys):
    job = FakeJob()
    with watch(WaitView, job, prefix=True):
        job.prints("a\nb\n", rank=0)
        job.prints("c\n", rank=1)
        job.end()
    assert capsys.readouterr().out == "[0]<stdout>: a\n[0]<stdout>: b\n[1]<stdout>: c\n"


def test_quiet_is_the_output_alone(capsys):
    job = a_job()
    with watch(WaitView, job, style="quiet"):
        job.prints("a\n")
        job.end()
    assert capsys.readouterr() == ("a\n", "")


def test_json_is_an_object_in_each_line(capsys):
    job = a_job()
    with watch(JsonView, job) as view:
        job.prints("a\n", rank=0)
        view.say("stopping")
        job.end()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["type"] for each in found] == [
        "message",
        "output",
        "event",
        "event",
        "event",
        "end",
    ]
    assert found[1] == {"type": "output", "rank": 0, "text": "a"}
    assert found[3]["kind"] == "lost" and found[3]["detail"] == "its process has ended"
    assert found[-1]["state"] == "finished"


def test_files_have_the_output_of_each_rank(tmp_path, capsys):
    job = FakeJob()
    with watch(WaitView, job, directory=str(tmp_path / "out")) as view:
        job.prints("a\n", rank=0)
        view.tick()
        job.prints("b\n", rank=1)
        job.prints("c\n", rank=0)
        job.end()
    assert (tmp_path / "out/rank.0/stdout").read_text() == "a\nc\n"
    assert (tmp_path / "out/rank.1/stdout").read_text() == "b\n"


def test_files_that_cannot_be_written_are_said_once_and_harm_nothing(tmp_path, capsys):
    (tmp_path / "out").write_text("a file")
    job = FakeJob()
    with watch(WaitView, job, directory=str(tmp_path / "out")) as view:
        for _ in range(2):
            job.prints("a\n")
            view.tick()
        job.end()
    out, err = capsys.readouterr()
    assert out == "a\na\n"
    assert err.count("--output-filename") == 1


def test_messages_of_other_threads_are_shown_by_the_view(capsys):
    display = CommandDisplay(ViewOptions())
    display.tell("host a is gone")
    job = FakeJob()
    with display.watching(job):
        job.end()
    display.tell("after the end")
    display.flush()
    assert capsys.readouterr().err.splitlines()[::2] == ["host a is gone", "after the end"]


def test_a_history_that_is_shorter_is_shown_anew(capsys):
    job = a_job()
    with watch(WaitView, job) as view:
        view.tick()
        job.history = job.history[:1]
        view.tick()
    assert capsys.readouterr().err.count("Rank 2 has joined") == 2


class Screen:
    def __init__(self, tty: bool) -> None:
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


@pytest.mark.parametrize(
    ("tty", "given", "style"),
    [
        (True, {}, "live"),
        (False, {}, "plain"),
        (True, {"plain": True}, "plain"),
        (True, {"json": True}, "json"),
        (True, {"quiet": True}, "quiet"),
    ],
)
def test_the_style_follows_options_and_terminal(tty, given, style, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")

    class Fake:
        stderr = Screen(tty)

    monkeypatch.setattr("nbelastic.cli.run.sys", Fake)
    assert view_options(given).style == style


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(term, monkeypatch):
    monkeypatch.setattr("nbelastic.cli.run.sys", Streams(Screen(True)))
    monkeypatch.setenv("TERM", term)
    assert view_options({}).style == "plain"


def test_a_reader_that_goes_away_stops_its_stream_alone(monkeypatch, capsys):
    """As ``| head`` does: events are shown on, and nothing fails at the end."""
    read, write = os.pipe()
    os.close(read)
    job = FakeJob()
    with open(write, "w", encoding="utf-8") as pipe:
        streams = Streams(None)
        streams.stdout, streams.stderr = pipe, sys.stderr
        monkeypatch.setattr("nbelastic.cli.view.display.sys", streams)
        with watch(WaitView, job) as view:
            job.prints("a\n")
            view.tick()
            job.happens("lost", 40.0, rank=3, detail="its process has ended")
            job.prints("b\n")
            job.end()
    assert "Rank 3 is lost" in capsys.readouterr().err


def test_without_stdout_or_stderr_nothing_fails(monkeypatch):
    monkeypatch.setattr("nbelastic.cli.view.display.sys", Streams(None))
    monkeypatch.setattr("nbelastic.cli.run.sys", Streams(None))
    assert view_options({}).style == "plain"
    job = a_job()
    with watch(WaitView, job) as view:
        job.prints("a\n")
        view.say("stopping")
        job.end()


def test_words_of_hosts_do_not_reach_the_terminal_as_control_characters(capsys):
    display = CommandDisplay(ViewOptions())
    display.say("a\x1b[2J\nb")
    display.tell("hosts.sh failed: \x1b]0;title\x07")
    display.flush()
    with watch(WaitView, FakeJob()) as view:
        view.say("\x1b[31mred")
    err = capsys.readouterr().err
    assert err.startswith("a\N{REPLACEMENT CHARACTER}[2J\nb\n") and "red" in err
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f]", err)


def test_the_cursor_is_back_also_when_the_last_look_fails(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(80)
    console = Console(file=terminal.stream, highlight=False, markup=False, width=80)
    job = a_job()
    with (
        pytest.raises(RuntimeError),
        LiveView(job, ViewOptions("live"), queue.SimpleQueue(), console=console),
    ):
        monkeypatch.setattr(job, "output", fail)
    assert "\x1b[?25h" in terminal.close()


def fail(_) -> None:
    raise RuntimeError


@pytest.fixture
def a_column():
    """Give ranks a column that the package does not have."""
    mine = Figure("Host", lambda rank: rank.worker.split(":")[1], in_frame=lambda _: "mine")
    FIGURES.append(mine)
    yield mine
    FIGURES.remove(mine)


def test_a_column_of_ones_own_is_in_the_panel_and_in_the_frame(a_column):
    job = a_job()
    assert "mine" in rows(job, 100)[1]
    shown = page(JobSnapshot.of(job))
    assert "Host" in shown
    assert a_column.cell(job.status.ranks[0]) in shown
