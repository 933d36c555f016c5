"""What ranks report and print reaches their owner, and what is displayed never harms a job."""

import faulthandler
import json
import os
import pdb
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import nbelastic
from nbelastic import render
from nbelastic.cli.run import exit_code
from nbelastic.driver import display, driver_of
from nbelastic.notebook.display_service import DisplayService
from tests.support.clusters import kinds, until
from tests.support.training import Fault, Workload, check, once, step_by_step


def reporting(marks):
    def over(state):
        if state.step == 18:
            return True
        time.sleep(0.05)
        nbelastic.report(rank=nbelastic.rank(), size=nbelastic.size(), place=10 * state.step)
        if state.step == 4 and nbelastic.rank() == 1 and once(marks / "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    step_by_step(over)


def test_a_rank_prints_in_every_way_and_its_child_processes_too(crew):
    def talk(raises):
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
        {"breakpoint": breakpoint, "pdb": pdb.set_trace, "input": input}[how]()
        return nbelastic.rank()

    with pytest.raises(nbelastic.errors.RankFailed, match="call it in the notebook without fit"):
        crew.fit(stop, np=1)


def test_reports_are_means_by_place_each_once_though_a_rank_dies(crew, tmp_path):
    job = crew.fit(reporting, args=[tmp_path], np=4, min_np=2)
    assert "lost" in kinds(job)
    rows = job.metrics.to_dict("records")
    assert [row["place"] for row in rows] == [10 * step for step in range(18)]
    assert [row["step"] for row in rows] == list(range(18))
    size = rows[-1]["size"]  # a newcomer may still join at the last commit
    assert (rows[-1]["ranks"], rows[-1]["rank"]) == (size, (size - 1) / 2)  # nothing is held back
    assert driver_of(job).log.metrics.curves(500)["place"][0] == (0.0, 0.0)


PHASES = ["aborted", "restored", "ready", "planned", "connected", "synchronised", "stepped"]


def test_history_and_timeline_tell_where_the_time_of_a_recovery_went(crew, tmp_path):
    path, faults = tmp_path / "timeline.json", (Fault(rank=1, epoch=2, batch=2),)
    work = Workload(tmp_path, epochs=1000, adamw=True, until_newcomers=1, faults=faults)
    cycles = {"HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    job = crew.fit(work, np=3, min_np=2, timeline=path, env=cycles, block=False)
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
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert rows == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    of_rank_0 = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    assert {"REDUCE_GRADIENTS", "COMMIT", "STATE_TRANSFER"} <= {each["name"] for each in of_rank_0}
    assert "CYCLE_START" in {event["name"] for event in events}
    resets = [event["ts"] for event in events if event["name"] == "RESET"]
    assert len(resets) >= 2 + 2 + 3
    assert min(resets) < max(event["ts"] for event in events if event["ph"] == "X")
    assert [each.name for each in tmp_path.glob("timeline.json*")] == ["timeline.json"]


def fails_later_on_rank_1():
    def train(state):
        if state.step == 5 and nbelastic.rank() == 1 and nbelastic.size() == 2:
            raise LookupError("a batch that is not there")
        return state.step == 30

    step_by_step(train)


def test_the_loss_of_a_rank_by_an_error_says_in_which_line(crew, monkeypatch, capsys):
    shows = DisplayService()
    shows.label = lambda file: "The cell" if file == __file__ else None
    monkeypatch.setattr(display, "_display", shows)
    job = crew.fit(fails_later_on_rank_1, np=2, min_np=1)
    lost = next(event for event in job.history if event.kind == "lost")
    assert re.search(
        r"LookupError: a batch.*; raised at The cell, line \d+, in train$", lost.detail
    )
    (headline,) = job.status.headlines
    assert re.fullmatch(r"a rank raised LookupError: .*, at The cell, line \d+, in train", headline)
    assert (job.status.state, job.status.errors) == ("finished", 1)
    line = render.text(render.JobSnapshot.of(job))
    assert "finished with 1 error · 1 rank" in line and f"warning: {headline[:100]}" in line
    job._ipython_display_()
    assert line in capsys.readouterr().out
    assert exit_code(lambda: job, SimpleNamespace(say=str, flush=list)) == 3
    with pytest.raises(ZeroDivisionError, match="The cell, line"):
        crew.fit(lambda: 1 / 0, np=1)


def talk_slowly(marks):
    print("early")
    until((marks / "go").exists, "to go on")
    print("late")


def test_output_can_be_followed_to_the_end(crew, tmp_path, capsys):
    job = crew.fit(talk_slowly, args=(tmp_path,), np=2, block=False)
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


def test_ranks_that_do_not_see_the_path_do_not_fail(crew, tmp_path):
    def hide():
        for path in Path(tmp_path).glob("sub"):
            path.rename(tmp_path / "hidden")

    (tmp_path / "sub").mkdir()
    job = crew.fit(hide, np=1, timeline=tmp_path / "sub" / "t.json")
    assert kinds(job).count("warning") == 1
    assert "there is no timeline at" in next(e.detail for e in job.history if e.kind == "warning")
