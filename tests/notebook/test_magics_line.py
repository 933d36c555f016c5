"""``%elastic``: looking at jobs, steering them, defaults."""

from __future__ import annotations

import dataclasses

import pytest

from nbelastic.errors import OptionError
from tests.notebook.fakes import rank_status
from tests.notebook.shells import run

pytestmark = pytest.mark.usefixtures("no_client")


@pytest.fixture
def job(shell, fit):
    run(shell, "%%elastic_train --noblock --name first -o one\n1")
    run(shell, "%%elastic_train --noblock --name second -o two\n2")
    return fit.job


@pytest.mark.parametrize("command", ["status", "stop", "cancel", "scale --max-np 2", "logs"])
def test_without_a_job_every_command_says_what_to_do(shell, command):
    error = run(shell, f"%elastic {command}", fails=True)
    assert isinstance(error, OptionError)
    assert "run a cell with %%elastic_train --noblock" in str(error)


def test_status_shows_the_latest_job(shell, job, capsys):
    named = dataclasses.replace(rank_status(0), name="alice")
    job.set(reason="waiting for 1 more", ranks=(named, rank_status(None)))
    run(shell, "%elastic status")
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "second: running, 4 ranks (2 to 8), generation 2, 120 commits, 2 resets"
    assert shown[1:] == [
        "  waiting for 1 more",
        "    0  running         10 commits  alice  tcp://10.0.0.0:40000",
        "    –  running         10 commits  tcp://10.0.0.99:40099",
    ]


def test_status_of_many_ranks_stays_short(shell, job, capsys):
    job.set(ranks=tuple(rank_status(i) for i in range(200)), max_np=None)
    run(shell, "%elastic status")
    shown = capsys.readouterr().out
    assert shown.count("\n") == 22
    assert "+ 180 more" in shown
    assert "(2 to all)" in shown


@pytest.mark.parametrize("name", ["first", "one"])
def test_a_job_is_found_by_its_name_or_its_variable(shell, job, capsys, name):
    run(shell, f"%elastic status --job {name}")
    assert capsys.readouterr().out.startswith("first:")


def test_an_unknown_job_is_an_error_that_names_the_known_ones(shell, job):
    error = run(shell, "%elastic stop --job third", fails=True)
    assert "--job third" in str(error)
    assert "second, first" in str(error)
    assert job.asked == []


def test_a_place_among_jobs_reaches_the_job(shell, job):
    run(shell, "%elastic scale --priority -1 --weight 2.5")
    assert job.asked == [(None, None, {"priority": -1, "weight": 2.5})]


def test_stop_cancel_and_scale_reach_the_job(shell, job):
    run(shell, "%elastic stop")
    run(shell, "%elastic scale --max-np 6")
    run(shell, "%elastic scale --min-np 2 --max-np 4")
    run(shell, "%elastic cancel")
    assert job.asked == ["stop", (None, 6), (2, 4), "cancel"]


def test_a_job_that_has_ended_is_left_alone(shell, job, capsys):
    job.end("finished")
    for command in ("stop", "cancel", "scale --max-np 2"):
        run(shell, f"%elastic {command}")
        assert capsys.readouterr().out == "second has ended already: finished\n"
    assert job.asked == []


def test_logs_are_those_of_one_rank_or_of_all(shell, job, capsys, monkeypatch):
    monkeypatch.setattr(type(job), "logs", lambda self, rank=None: f"of {rank}\n", raising=False)
    run(shell, "%elastic logs")
    run(shell, "%elastic logs --rank 2")
    assert capsys.readouterr().out == "of None\nof 2\n"
    monkeypatch.setattr(type(job), "logs", lambda self, rank=None: "")
    run(shell, "%elastic logs --rank 2")
    assert capsys.readouterr().out == "second: rank 2 has printed nothing yet\n"


def test_why_is_about_one_rank_or_all(shell, job, capsys, monkeypatch):
    monkeypatch.setattr(type(job), "why", lambda self, rank=None: f"of {rank}", raising=False)
    run(shell, "%elastic why")
    run(shell, "%elastic why --rank 2")
    assert capsys.readouterr().out == "of None\nof 2\n"


def test_a_rank_that_the_job_never_had_is_an_error(shell, job, monkeypatch):
    def logs(self, rank=None):
        raise OptionError(f"rank={rank}: so far this job has had ranks 0 to 1")

    monkeypatch.setattr(type(job), "logs", logs, raising=False)
    error = run(shell, "%elastic logs --rank 7", fails=True)
    assert type(error).__name__ == "MagicOptionError"
    assert "%elastic logs: rank=7: so far this job has had ranks 0 to 1" in str(error)


def test_jobs_lists_the_latest_first(shell, job, capsys):
    run(shell, "%elastic jobs")
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "second",
        "first",
    ]


def test_ended_jobs_that_no_variable_holds_are_forgotten_in_time(shell, fit, capsys):
    run(shell, "%%elastic_train --noblock --name goes-on\n1;")
    for number in range(8):
        run(shell, f"%%elastic_train --noblock --name job-{number}\n1;")
        fit.job.end()
    capsys.readouterr()
    run(shell, "%elastic jobs")
    names = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [*(f"job-{number}" for number in range(7, 2, -1)), "goes-on"]


def test_jobs_without_any_says_so(shell, capsys):
    run(shell, "%elastic jobs")
    assert capsys.readouterr().out == "no job yet\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "a command is missing; there are status, stop"),
        ("stat", "did you mean %elastic status?"),
        ("status --jbo x", "did you mean --job?"),
        ("scale", "%elastic scale --min-np 2 --max-np 6"),
        ("scale --max-np 0", "at least 1"),
        ("scale --priority high", "--priority"),
        ("scale --max 2", "did you mean --max-np?"),
        ("stop job", "did you mean --job?"),
        ("logs --rank first", "'first' must be a whole number"),
        ("jobs all", "'all' belongs to no option"),
        ("config max-pn=8", "did you mean max-np?"),
    ],
)
def test_a_wrong_line_is_an_error_that_says_what_to_write(shell, job, line, says):
    error = run(shell, f"%elastic {line}", fails=True)
    assert isinstance(error, OptionError)
    assert says in str(error)
    assert "%elastic?" in str(error) or "%elastic scale" in str(error)


# -- defaults ----------------------------------------------------------------------------------


def test_defaults_hold_for_later_cells_that_do_not_override_them(shell, fit, capsys):
    run(shell, "%elastic config max-np=8 stream=all block=false")
    assert capsys.readouterr().out == "block=false max-np=8 stream=all\n"
    assert run(shell, "%%elastic_train\n1").result is fit.job
    assert fit.options["max_np"] == 8
    assert run(shell, "%%elastic_train --max-np 4 --block\n1").result == 1
    assert fit.options["max_np"] == 4


def test_defaults_are_shown_as_they_are_written(shell, capsys):
    settings = "blacklist-cooldown=10,100 resources=GPU=1,MEM=2 stall-timeout=30 workers=a,b"
    run(shell, f"%elastic config {settings}")
    run(shell, "%elastic config")
    assert capsys.readouterr().out == f"{settings}\n" * 2


def test_one_default_can_be_taken_back_and_all_of_them(shell, capsys):
    run(shell, "%elastic config max-np=8 np=2")
    run(shell, "%elastic config max-np=")
    run(shell, "%elastic config --reset")
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == "np=2"
    assert shown[2].startswith("no defaults set")


def test_a_wrong_setting_sets_none_of_its_line(shell, capsys):
    run(shell, "%elastic config np=2 max-np=many", fails=True)
    capsys.readouterr()
    run(shell, "%elastic config")
    assert capsys.readouterr().out.startswith("no defaults set")
