"""The line of ``%%elastic_train``: every option of fit, no abbreviation, errors that help."""

import inspect
import os
import shlex

import pytest

import nbelastic
from nbelastic.cli.commands import RunCommand
from nbelastic.driver.options import OF_SCRIPTS, ROWS, TABLE, Options
from nbelastic.errors import OptionError
from nbelastic.notebook.options import MagicOptionError, split, train_command


def parse(line):
    return train_command().read(split(line, "%%elastic_train"))


def parse_terminal(line):
    found = {}
    command = RunCommand(lambda **options: found.update(options))
    command.main([*shlex.split(line), "train.py"], standalone_mode=False)
    return found


def test_every_option_of_fit_is_there_and_no_other():
    of_the_cell = {"fn", "args", "kwargs", "block", "cluster", "log_to", "name"}
    assert set(ROWS) == set(inspect.signature(nbelastic.fit).parameters) - of_the_cell
    assert set(ROWS) <= {param.name for param in train_command().params}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_an_option_has_one_value_on_each_line_and_in_python(row):
    value = parse(row.example)[row.name]
    assert value not in (None, False)
    assert row.kind.check(row.name, value) == value
    words = row.example.replace("alice bob", "alice,bob").replace("GPU=1 MEM=2", "GPU=1,MEM=2")
    if row in OF_SCRIPTS:
        assert parse_terminal(words)[row.name] == value


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("", {}),
        ("-o job -a -q", {"out": "job", "block": False, "quiet": True}),
        ("--block --stream all", {"block": True, "stream": "all"}),
        ("--max-np=8 --priority -1", {"max_np": 8, "priority": -1}),
        ("--workers alice bob --name 'my-job'", {"workers": ("alice", "bob"), "name": "my-job"}),
        ("--checkpoint runs", {"checkpoint": os.path.abspath("runs")}),
    ],
)
def test_the_options_of_the_cell_itself(line, found):
    assert parse(line) == found


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--max 8", ["No such option", "--max-np"]),
        ("--max_np 8", ["No such option", "--max-np"]),
        ("--help", ["No such option", "--help"]),
        ("max_np=8", ["'max_np=8'", "did you mean --max-np 8?"]),
        ("8", ["'8' belongs to no option"]),
        ("--np zero", ["--np", "'zero'", "whole number, at least 1"]),
        ("--np", ["--np", "requires an argument"]),
        ("--elastic-timeout soon", ["--elastic-timeout", "'soon'", "above 0", "'90 s'"]),
        ("--backend glo", ["--backend", "'glo'", "auto, gloo, shm"]),
        ("--env RANK=secret", ["--env", "nbelastic sets this variable itself"]),
        ("--env A B", ["--env", "'A' is not set here; give A=VALUE"]),
        ("--blacklist-cooldown 100 10", ["--blacklist-cooldown", "100 10", "lo <= hi"]),
        ("--stream rank", ["--stream", "'rank'", "rank0, all, none"]),
        ("-o 2nd", ["-o/--out", "'2nd'", "a variable"]),
    ],
)
def test_a_wrong_option_is_an_error_that_says_what_to_write(line, says):
    with pytest.raises(MagicOptionError) as caught:
        parse(line)
    message = str(caught.value)
    for part in (*says, "%%elastic_train?"):
        assert part in message
    assert isinstance(caught.value, OptionError)
    with pytest.raises(MagicOptionError, match="no closing quotation"):
        parse(f"{line} --name 'resnet")


def test_variables_of_ranks_may_have_commas_and_are_not_shown():
    found = {"A": "b,c", "B": "x=y"}
    assert parse("--env A=b,c B=x=y")["env"] == found
    assert parse_terminal("-x A=b,c --env B=x=y")["env"] == found
    assert "b,c" not in repr(Options(env=found))
