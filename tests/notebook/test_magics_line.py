"""``%elastic``: looking at jobs, steering them."""

import dataclasses

import pytest

from nbelastic.errors import OptionError
from tests.notebook.fakes import rank_status, run

pytestmark = pytest.mark.usefixtures("no_client")


@pytest.fixture
def job(shell, fit):
    run(shell, "%%elastic_train --noblock --name first -o one\n1")
    run(shell, "%%elastic_train --noblock --name second -o two\n2")
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


def test_a_job_is_found_by_its_name_or_its_variable(shell, job, capsys):
    for name in ("first", "one"):
        run(shell, f"%elastic status --job {name}")
        assert capsys.readouterr().out.startswith("first:")
    error = str(run(shell, "%elastic stop --job third", fails=True))
    assert "--job third" in error and "second, first" in error and job.asked == []


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
    monkeypatch.setattr(type(job), command, lambda *_: found[command], raising=False)
    run(shell, f"%elastic {command} --rank 2")
    said = {"logs": "second: rank 2 has printed nothing yet\n", "why": "of 2\n"}
    assert capsys.readouterr().out == said[command]

    def refuse(self, rank=None):
        raise OptionError(f"rank={rank}: so far this job has had ranks 0 to 1")

    monkeypatch.setattr(type(job), command, refuse, raising=False)
    error = run(shell, f"%elastic {command} --rank 7", fails=True)
    assert f"%elastic {command}: rank=7: so far this job has had ranks 0 to 1" in str(error)


def test_ended_jobs_that_no_variable_holds_are_forgotten_in_time(shell, fit, capsys):
    run(shell, "%elastic jobs")
    assert capsys.readouterr().out == "no job yet\n"
    error = run(shell, "%elastic stop", fails=True)
    assert "run a cell with %%elastic_train --noblock" in str(error)
    capsys.readouterr()
    run(shell, "%%elastic_train --noblock --name goes-on\n1;")
    for number in range(8):
        run(shell, f"%%elastic_train --noblock --name job-{number}\n1;")
        fit.job.end()
    capsys.readouterr()
    run(shell, "%elastic jobs")
    names = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [*(f"job-{number}" for number in range(7, 2, -1)), "goes-on"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "a command is missing; there are status, stop"),
        ("stat", "did you mean status?"),
        ("scale", "%elastic scale --min-np 2 --max-np 6"),
        ("scale --max 2", "did you mean --max-np?"),
        ("jobs all", "'all' belongs to no option"),
    ],
)
def test_a_wrong_line_is_an_error_that_says_what_to_write(shell, job, line, says):
    error = run(shell, f"%elastic {line}", fails=True)
    assert isinstance(error, OptionError)
    assert says in str(error)
    assert "%elastic?" in str(error) or "%elastic scale" in str(error)
