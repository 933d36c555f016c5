"""``%elastic``: looking at jobs, steering them."""

import dataclasses

import pytest

from nbelastic.errors import OptionError
from tests.notebook.fakes import rank_status, run

pytestmark = pytest.mark.usefixtures("no_client")


@pytest.fixture
def job(shell, fit):
    assert "there is no job yet" in str(run(shell, "%elastic stop", fails=True))
    run(shell, "%%elastic_train --noblock --name first -o one\n1")
    run(shell, "%%elastic_train --noblock --name second\n2;")
    return fit.job


def test_status_shows_the_latest_job_and_its_ranks(shell, job, capsys):
    named = dataclasses.replace(rank_status(0), name="alice")
    job.set(reason="waiting for 1 more", ranks=(named, rank_status(None)), max_np=None)
    run(shell, "%elastic status")
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("second: running (waiting for 1 more) · 4 ranks · 120 commits")
    assert shown[1:] == [
        "  waiting for 1 more",
        "    0  running         10 commits  alice  tcp://10.0.0.0:40000",
        "    –  running         10 commits  tcp://10.0.0.99:40099",
    ]


def test_stop_cancel_and_scale_reach_the_job(shell, job):
    run(shell, "%elastic stop")
    run(shell, "%elastic scale --min-np 2 --max-np 4")
    run(shell, "%elastic scale --priority -1 --weight 2.5")
    run(shell, "%elastic cancel")
    limits, place = {"min_np": 2, "max_np": 4}, {"priority": -1, "weight": 2.5}
    assert job.asked == ["stop", limits, place, "cancel"]


def test_a_job_that_has_ended_is_left_alone(shell, job, capsys):
    job.end("finished")
    for command in ("stop", "cancel", "scale --max-np 2"):
        run(shell, f"%elastic {command}")
        assert capsys.readouterr().out == "second has ended already: finished\n"
    assert job.asked == []


@pytest.mark.parametrize("command", ["logs", "why"])
def test_logs_and_decisions_are_those_of_one_rank_or_of_all(
    shell, job, capsys, monkeypatch, command
):
    found = {"logs": "", "why": "of 2"}
    monkeypatch.setattr(type(job), command, lambda *_, rank: found[command], raising=False)
    run(shell, f"%elastic {command} --rank 2")
    said = {"logs": "second: nothing was printed yet\n", "why": "of 2\n"}
    assert capsys.readouterr().out == said[command]

    def refuse(self, rank=None):
        raise OptionError(f"rank={rank}: so far this job has had ranks 0 to 1")

    monkeypatch.setattr(type(job), command, refuse, raising=False)
    error = run(shell, f"%elastic {command} --rank 7", fails=True)
    assert f"%elastic {command}: rank=7: so far this job has had ranks 0 to 1" in str(error)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "a command is missing; there are status, stop"),
        ("stat", "did you mean status?"),
        ("scale", "%elastic scale --min-np 2 --max-np 6"),
        ("scale --max 2", "--max-np"),
        ("stop all", "'all' belongs to no option"),
    ],
)
def test_a_wrong_line_is_an_error_that_says_what_to_write(shell, job, line, says):
    error = run(shell, f"%elastic {line}", fails=True)
    assert isinstance(error, OptionError)
    assert says in str(error)
    assert "%elastic?" in str(error) or "%elastic scale" in str(error)
