"""The options of ``run``: one table for fit, the command, its help and its documents."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from nbelastic.cli import clusters
from nbelastic.cli import run as running
from nbelastic.cli.commands import TERMINAL, RunCommand, flags_of
from nbelastic.cli.entry import COMMANDS, elastic
from nbelastic.driver.options import OF_SCRIPTS
from nbelastic.errors import OptionError

DOCS = Path(__file__).parents[2] / "docs"


def command(found: dict) -> RunCommand:
    return RunCommand(lambda **options: found.update(options))


def parse(line: str) -> dict:
    found: dict = {}
    command(found).main(line.split(), standalone_mode=False)
    found.pop("discovery_interval")
    return {k: v for k, v in found.items() if v not in (None, (), False)}


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text, re.IGNORECASE))


def test_every_option_is_in_the_help_and_those_of_other_commands_are_on_the_page():
    """The page's tables are made of the options of ``run``."""
    made, page = command({}), (DOCS / "terminal.md").read_text()
    named = {flag for row in OF_SCRIPTS for flag in flags_of(row)}
    named.update(flag for each in TERMINAL for flag in (*each.opts, *each.secondary_opts))
    assert named <= flags_in(made.get_help(click.Context(made, terminal_width=100)))
    for name in set(COMMANDS) - {"run"}:
        params = elastic.get_command(click.Context(elastic), name).params
        assert {flag for each in params for flag in each.opts if flag[0] == "-"} <= flags_in(page)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--num-proc 4 x", {"np": 4}),
        ("--min-num-proc 2 --max-num-proc=8 x", {"min_np": 2, "max_np": 8}),
        ("--max-resets 3 x", {"reset_limit": 3}),
        ("--blacklist-cooldown-range 10 100 x", {"blacklist_cooldown": (10.0, 100.0)}),
        ("-H a:2,b:2 x", {"hosts": "a:2,b:2"}),
        ("-p 2222 x", {"ssh_port": 2222}),
        ("--log-level DEBUG x", {"log_level": "debug"}),
        ("--output-filename out --verbose x", {"output_filename": "out", "verbose": True}),
        ("-x PATH -x B=1,C= x", {"env": {"PATH": os.environ["PATH"], "B": "1,C="}}),
        ("--workers a,b --workers c --resume x", {"workers": ("a", "b", "c"), "resume": True}),
    ],
)
def test_names_of_horovodrun_are_read(line, found):
    assert parse(f"{line} -np 7 --json") == {**found, "command": ("x", "-np", "7", "--json")}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--max 8 x", "--max-np"),
        ("-x =1 x", "'' must be the name of a variable"),
        ("-x RANK=1 x", "['RANK']: nbelastic sets this variable itself"),
    ],
)
def test_a_wrong_option_is_an_error_that_says_what_to_write(line, says):
    with pytest.raises(click.UsageError) as caught:
        parse(line)
    assert says in caught.value.format_message()


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


@pytest.mark.parametrize(
    ("option", "text", "says"),
    [
        ("hostfile", "{file}", "--hostfile, line 1"),  # of other bytes
        ("hosts", "a:1", "--scheduler and --hosts: give one of them"),
        # As of a variable of a shell that is not set, which must not start ranks here.
        *(
            (name, "", f"--{name.replace('_', '-')}: its value is empty")
            for name in clusters.NAMING
        ),
    ],
)
def test_machines_that_cannot_be_meant_are_a_line(tmp_path, option, text, says):
    file = tmp_path / "of-it"
    file.write_bytes(b"1: caf\xe9\n")
    options = {option: text.format(file=file)}
    if text == "a:1":
        options["scheduler"] = "tcp://a:8786"
    with pytest.raises(OptionError, match=says):
        clusters.opened(options, print).__enter__()


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


def test_an_interrupt_while_an_interrupt_is_told_is_none_more(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    script = tmp_path / "train.py"
    script.touch()
    for place, name in ((clusters, "opened"), (running.CommandDisplay, "say")):
        monkeypatch.setattr(place, name, interrupted)
    monkeypatch.setattr(running, "set_display", lambda _: None)
    assert CliRunner().invoke(elastic, ["run", "-H", "localhost:1", str(script)]).exit_code == 130


def test_letters_that_a_terminal_lacks_are_no_error(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    show = click.Command("show", callback=lambda: print("\u2713 \udcff", flush=True))
    monkeypatch.setattr(elastic, "get_command", lambda *_: show)
    elastic.main(["show"], standalone_mode=False)
    assert written.getvalue() == b"\\u2713 \\udcff\n"
