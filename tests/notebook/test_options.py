"""The line of ``%%elastic_train``: every option of fit, no abbreviation, errors that help."""

from __future__ import annotations

import inspect
import os

import pytest

import nbelastic
from nbelastic.errors import OptionError
from nbelastic.notebook.magics import ElasticMagics
from nbelastic.notebook.options import (
    OF_FIT,
    MagicOptionError,
    options_help,
    parse_setting,
    split,
    train_parser,
)


def parse(line):
    return train_parser().parse_line(split(line, "%%elastic_train"))


def test_every_option_of_fit_is_there_and_no_other():
    of_the_cell = {"fn", "args", "kwargs", "block", "cluster", "name"}
    assert set(OF_FIT) == set(inspect.signature(nbelastic.fit).parameters) - of_the_cell


def test_every_option_of_fit_is_read_as_fit_takes_it():
    line = (
        "--cluster client --np 3 --min-np 2 --max-np 4 --check-every 9 --workers alice bob "
        "--resources GPU=1 MEM=2.5 --slots-per-host 2 --priority -1 --weight 2 --preemptible "
        "--reset-limit 0 --elastic-timeout 60 --stall-timeout 0.5 "
        "--heartbeat-timeout 5 --blacklist-cooldown 10 100 --lease 600 --notices off "
        "--checkpoint runs/resnet --checkpoint-every 50 --resume --backend shm --name resnet "
        "--timeline trace.json --env NCCL_DEBUG=INFO A=b=c"
    )
    found = parse(line)
    assert found == {
        "cluster": "client",
        "np": 3,
        "min_np": 2,
        "max_np": 4,
        "check_every": 9,
        "workers": ("alice", "bob"),
        "resources": {"GPU": 1.0, "MEM": 2.5},
        "env": {"NCCL_DEBUG": "INFO", "A": "b=c"},
        "slots_per_host": 2,
        "priority": -1,
        "weight": 2.0,
        "preemptible": True,
        "reset_limit": 0,
        "elastic_timeout": 60.0,
        "stall_timeout": 0.5,
        "heartbeat_timeout": 5.0,
        "blacklist_cooldown": (10.0, 100.0),
        "lease": 600.0,
        "notices": "off",
        "checkpoint": os.path.abspath("runs/resnet"),
        "checkpoint_every": 50,
        "resume": True,
        "backend": "shm",
        "timeline": os.path.abspath("trace.json"),
        "name": "resnet",
    }
    assert set(found) == {*OF_FIT, "cluster", "name"}


def test_durations_on_a_line_are_read_as_dask_reads_them():
    found = parse("--stall-timeout 2m --lease '1 day' --blacklist-cooldown 10s 2m")
    assert found == {
        "stall_timeout": 120.0,
        "lease": 86400.0,
        "blacklist_cooldown": (10.0, 120.0),
    }


def test_the_help_has_every_option_with_a_valid_example():
    text = options_help("%%elastic_train")
    for row in OF_FIT.values():
        assert f"  {row.flag}" in text
        assert row.name in parse(row.example)
        assert f"%%elastic_train {row.example}" in text
    assert text.strip() in str(ElasticMagics.elastic_train.__doc__)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("", {}),
        ("-o job -a -q", {"out": "job", "block": False, "quiet": True}),
        ("--stream all", {"stream": "all"}),
        ("--out job --noblock", {"out": "job", "block": False}),
        ("--block --quiet", {"block": True, "quiet": True}),
        ("-b", {"block": True}),
        ("--max-np=8", {"max_np": 8}),
        ("--name 'my-job'", {"name": "my-job"}),
    ],
)  # fmt: skip
def test_the_options_of_the_cell_itself(line, found):
    assert parse(line) == found


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--max 8", ["no option --max", "did you mean --max-np?"]),
        ("--max_np 8", ["no option --max_np", "did you mean --max-np?"]),
        ("--maxnp=8", ["no option --maxnp;", "--max-np"]),
        ("-h", ["no option -h"]),
        ("--help", ["no option --help"]),
        ("--num-workers 4", ["no option --num-workers", "did you mean --np?"]),
        ("--nproc_per_node=2", ["did you mean --np or --slots-per-host?"]),
        ("--max-restarts 3", ["did you mean --reset-limit?"]),
        ("max_np=8", ["'max_np=8'", "did you mean --max-np 8?"]),
        ("8", ["'8' belongs to no option"]),
        ("--np zero", ["--np", "'zero'", "whole number, at least 1"]),
        ("--np 0", ["--np", "'0'", "at least 1"]),
        ("--np -1", ["--np", "'-1'", "at least 1"]),
        ("--np", ["--np", "expected one argument"]),
        ("--reset-limit -1", ["--reset-limit", "at least 0"]),
        ("--elastic-timeout soon", ["--elastic-timeout", "'soon'", "above 0", "'90 s'"]),
        ("--stall-timeout 0", ["--stall-timeout", "'0'", "above 0"]),
        ("--backend glo", ["--backend", "'glo'", "auto, gloo, shm", "did you mean gloo or"]),
        ("--resources GPU", ["--resources", "'GPU'", "GPU=1"]),
        ("--resources GPU=none", ["--resources", "'GPU=none'"]),
        ("--env RANK=secret", ["--env", "nbelastic sets this variable itself"]),
        ("--blacklist-cooldown 10", ["--blacklist-cooldown", "2"]),
        ("--blacklist-cooldown 100 10", ["--blacklist-cooldown", "100 10", "LO <= HI"]),
        ("--stream rank", ["--stream", "'rank'", "rank0, all, none", "did you mean rank0?"]),
        ("-o 2nd", ["-o/--out", "'2nd'", "a variable"]),
        ("-o class", ["-o/--out", "'class'"]),
        ("-a -b", ["-b/--block", "not allowed with"]),
    ],
)
def test_a_wrong_option_is_an_error_that_says_what_to_write(line, says):
    with pytest.raises(MagicOptionError) as caught:
        parse(line)
    message = str(caught.value)
    for part in (*says, "%%elastic_train?"):
        assert part in message
    assert isinstance(caught.value, OptionError)


def test_an_open_quote_is_an_error():
    with pytest.raises(MagicOptionError, match="no closing quotation"):
        parse("--name 'resnet")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("max-np=8", ("max_np", 8)),
        ("max_np=8", ("max_np", 8)),
        ("--max-np=8", ("max_np", 8)),
        ("max-np=", ("max_np", None)),
        ("workers=alice,bob", ("workers", ("alice", "bob"))),
        ("resources=GPU=1,MEM=2", ("resources", {"GPU": 1.0, "MEM": 2.0})),
        ("blacklist-cooldown=10,100", ("blacklist_cooldown", (10.0, 100.0))),
        ("stream=all", ("stream", "all")),
        ("block=false", ("block", False)),
        ("quiet=true", ("quiet", True)),
        ("resume=true", ("resume", True)),
    ],
)
def test_a_default_is_read_as_the_option_is(text, found):
    assert parse_setting(text) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-pn=8", "did you mean max-np"),
        ("num-proc=8", "did you mean np?"),
        ("colour=red", "there are backend, blacklist-cooldown, block"),
        ("max-np", "must be OPTION=VALUE"),
        ("max-np=many", "'many' must be a whole number"),
        ("name=resnet", "belongs to one cell"),
        ("out=job", "belongs to one cell"),
        ("quiet=maybe", "must be true or false"),
    ],
)
def test_a_wrong_default_is_an_error_that_says_what_to_write(text, says):
    with pytest.raises(MagicOptionError, match=says):
        parse_setting(text)


def test_a_flag_with_a_value_is_said_to_take_none():
    with pytest.raises(MagicOptionError, match="--preemptible: takes no value, not even 'true'"):
        parse("--preemptible=true")
