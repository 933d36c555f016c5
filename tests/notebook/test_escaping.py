"""What users, workers and errors say is text, wherever HTML is made of a job."""

from __future__ import annotations

import dataclasses

import pytest

from nbelastic.notebook.panel import Panel
from nbelastic.render import PARTS, JobSnapshot, page

from .fakes import STARTED, FakeJob, event, job_status, rank_status

EVIL = "</text></title></pre><script>alert('1')</script><img src=x onerror=\"alert(2)\">"
KINDS = (
    "joined",
    "lost",
    "left",
    "reset",
    "refused",
    "restarted",
    "cooldown",
    "share",
    "failed",
    "stopped",
)


def evil_rank(number):
    return dataclasses.replace(rank_status(number), worker=EVIL, host=EVIL, state=EVIL, device=EVIL)


def evil_event(kind, at):
    return dataclasses.replace(event(kind, at, rank=1, detail=EVIL, size=2), worker=EVIL)


def assert_harmless(source):
    assert "<script" not in source
    assert "<img" not in source


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [*PARTS, "page"])
def test_no_part_of_a_job_brings_tags_of_its_own(part, kind):
    history = tuple(evil_event(kind, at) for at in (1, 2))
    for state in ("running", "waiting", "failed", "stopped"):
        status = job_status(name=EVIL, state=state, reason=EVIL, ranks=(evil_rank(0),))
        snapshot = JobSnapshot(status, history, STARTED, {EVIL: [(0, 1.0), (1, 2.0)]})
        source = page(snapshot, note=EVIL) if part == "page" else PARTS[part](snapshot)
        assert_harmless(source)


def test_what_is_cut_off_is_not_cut_within_an_escape():
    for length in range(40, 80):
        source = PARTS["head"](JobSnapshot(job_status(name="&" * length)))
        assert source.count("&") == source.count("&amp;")


def test_the_panel_shows_no_tags_of_a_job_either():
    job = FakeJob(name=EVIL, state="running", reason=EVIL, ranks=(evil_rank(0),))
    job.shapes = {EVIL: [(0.0, 1.0), (1.0, 2.0)]}
    job.happens("reset", detail=EVIL)
    panel = Panel(job)
    shown = [part.value for part in panel._parts.values()]
    assert any("&lt;script&gt;" in value for value in shown)
    for value in shown:
        assert_harmless(value)
    job.end("failed", reason=EVIL)
    panel.finish()
    for part in panel._parts.values():
        assert_harmless(part.value)
