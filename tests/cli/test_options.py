"""The options of ``run``: one table for fit, the command, its help and its documents."""

from __future__ import annotations

import inspect
import io
import os
import re
import signal
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import nbelastic
from nbelastic.cli import clusters
from nbelastic.cli import run as running
from nbelastic.cli.commands import HOROVODS, TERMINAL, RunCommand, flags_of, run_command
from nbelastic.cli.entry import COMMANDS, elastic
from nbelastic.driver.options import OF_SCRIPTS
from nbelastic.errors import OptionError

DOCS = Path(__file__).parents[2] / "docs"


def command(found: dict) -> RunCommand:
    def collect(**options):
        """Start a script."""
        found.update({k: v for k, v in options.items() if v not in (None, (), False)})

    return run_command(collect)


def parse(line: str) -> dict:
    found: dict = {}
    command(found).main(line.split(), standalone_mode=False)
    found.pop("discovery_interval")
    return found


def help_text() -> str:
    made = command({})
    return made.get_help(click.Context(made, terminal_width=100))


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text, re.IGNORECASE))


def flags_of_the_page() -> set[str]:
    return {flag for code in re.findall(r"`([^`\n]+)`", page()) for flag in flags_in(code)}


def page() -> str:
    return (DOCS / "terminal.md").read_text()


def test_every_option_is_in_the_help_and_in_the_documents():
    expected = {flag for row in OF_SCRIPTS for flag in flags_of(row)}
    for option in TERMINAL:
        expected.update((*option.opts, *option.secondary_opts))
    assert expected <= flags_in(help_text())
    assert expected <= flags_of_the_page()


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "run"])
def test_every_option_of_the_other_commands_is_in_the_documents(name):
    found = elastic.get_command(click.Context(elastic), name)
    options = [param for param in found.params if isinstance(param, click.Option)]
    assert {flag for param in options for flag in param.opts} <= flags_of_the_page()


def test_every_option_of_fit_is_an_option_or_made_of_the_command():
    known = {param.name for param in command({}).params}
    of_the_command = {"fn", "args", "kwargs", "block", "log_to", "pull"}
    missing = set(inspect.signature(nbelastic.fit).parameters) - known - of_the_command
    assert not missing


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("-np 4 x", {"np": 4}),
        ("--num-proc 4 x", {"np": 4}),
        ("--min-num-proc 2 --max-num-proc=8 x", {"min_np": 2, "max_np": 8}),
        ("--reset-limit 3 x", {"reset_limit": 3}),
        ("--max-resets 3 x", {"reset_limit": 3}),
        ("--blacklist-cooldown-range 10 100 x", {"blacklist_cooldown": (10.0, 100.0)}),
        ("--elastic-timeout 60 x", {"elastic_timeout": 60.0}),
        ("--slots-per-host 2 x", {"slots_per_host": 2}),
        ("--host-discovery-script d.sh x", {"host_discovery_script": "d.sh"}),
        ("-H a:2,b:2 x", {"hosts": "a:2,b:2"}),
        ("--hosts a:2 x", {"hosts": "a:2"}),
        ("-p 2222 x", {"ssh_port": 2222}),
        ("--log-level DEBUG x", {"log_level": "debug"}),
        ("--output-filename out --verbose x", {"output_filename": "out", "verbose": True}),
        ("-x PATH -x B=1 x", {"env": {"PATH": os.environ["PATH"], "B": "1"}}),
    ],
)
def test_names_of_horovodrun_are_read(line, found):
    assert parse(line) == {**found, "command": ("x",)}


def test_options_of_fit_are_read_as_fit_takes_them():
    line = "--stall-timeout 2m --resources GPU=1,MEM=2 --workers a,b --workers c --resume "
    line += "-x A=b,c --env D= x"
    assert parse(line) == {
        "stall_timeout": 120.0,
        "resources": {"GPU": 1.0, "MEM": 2.0},
        "workers": ("a", "b", "c"),
        "env": {"A": "b,c", "D": ""},
        "resume": True,
        "command": ("x",),
    }


def test_everything_from_the_first_word_on_is_the_command():
    found = parse("-np 2 python train.py --epochs 3 -np 7 --json")
    assert found == {
        "np": 2,
        "command": ("python", "train.py", "--epochs", "3", "-np", "7", "--json"),
    }


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--max 8 x", "there is no option --max; did you mean --max-np"),
        ("--nproc-per-node 8 x", "did you mean --np or --slots-per-host"),
        ("-np zero x", "'zero' must be a whole number, at least 1"),
        ("--blacklist-cooldown 9 1 x", "'9 1' must be LO HI"),
        ("--backend glo x", "must be one of auto"),
        ("--resources GPU x", "'GPU' must be NAME=AMOUNT"),
        ("-x =1 x", "'' must be the name of a variable"),
        ("-x RANK=1 x", "['RANK']: nbelastic sets this variable itself"),
    ],
)
def test_a_wrong_option_is_an_error_that_says_what_to_write(line, says):
    with pytest.raises(click.UsageError) as caught:
        parse(line)
    assert says in caught.value.format_message()


def test_horovods_names_belong_to_options_that_exist():
    assert set(HOROVODS) <= {row.name for row in OF_SCRIPTS}


# -- what stands around the options ----------------------------------------------------------------


def test_an_ignored_signal_stays_ignored():
    """As with ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with running._ended_by_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("flag", ["--scheduler", "-H", "--hosts-from", "--cluster"])
def test_an_empty_value_names_no_machine(flag):
    """A variable of a shell that is not set must not start ranks here."""
    found = parse(f"{flag} VALUE train.py")
    (name,) = (name for name, value in found.items() if value == "VALUE")
    with pytest.raises(OptionError, match=f"--{name.replace('_', '-')}: its value is empty"):
        clusters.opened({name: ""}, print).__enter__()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("os.path", "must be MODULE.CLASS"),
        ("os.sep", "must be MODULE.CLASS"),
        ("fractions.Fraction:{file}", "takes no such arguments"),
        ("collections.abc.Sized", "takes no such arguments"),
        ("{file}", "must be MODULE.CLASS"),
    ],
)
def test_a_class_that_is_none_is_a_line(tmp_path, text, says):
    file = tmp_path / "of-it"
    file.write_text("1: 2\n")
    with pytest.raises(OptionError, match=says):
        clusters.opened({"cluster": text.format(file=file)}, print).__enter__()


@pytest.mark.parametrize("wrong", ["-np 3 --min-np 4", "--name a/b"])
def test_what_fit_would_refuse_is_refused_before_a_cluster_starts(tmp_path, monkeypatch, wrong):
    """Else machines would be asked for first, at a cluster's queue or a cloud."""
    script = tmp_path / "train.py"
    script.touch()
    started: list[object] = []
    monkeypatch.setattr(clusters, "HostCluster", lambda *_, **__: started.append(1) or 1 / 0)
    monkeypatch.setattr(running, "set_display", started.append)
    words = ["-H", "localhost:1", *wrong.split(), str(script)]
    ended = CliRunner().invoke(elastic, ["run", *words])
    assert ended.exit_code == 2, ended.output
    assert not started


def test_a_hostfile_of_other_bytes_is_a_line(tmp_path):
    file = tmp_path / "hosts"
    file.write_bytes(b"caf\xe9 slots=1\n")
    with pytest.raises(OptionError, match="--hostfile, line 1"):
        clusters.opened({"hostfile": str(file)}, print).__enter__()


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no file without an end")
def test_a_hostfile_without_an_end_is_refused():
    with pytest.raises(OptionError, match="--hostfile /dev/zero: is longer than"):
        clusters.opened({"hostfile": "/dev/zero"}, print).__enter__()


def test_letters_that_a_terminal_lacks_are_no_error(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    show = click.Command("show", callback=lambda: print("\u2713 \udcff", flush=True))
    monkeypatch.setattr(elastic, "get_command", lambda *_: show)
    elastic.main(["show"], standalone_mode=False)
    assert written.getvalue() == b"\\u2713 \\udcff\n"
