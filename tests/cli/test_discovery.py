"""Hosts: what is present, what has changed, and when to look again."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import psutil
import pytest

from nbelastic.cli.clusters import script_source
from nbelastic.cli.hosts.discovery import (
    DiscoveryFailed,
    delay,
    parse_hostfile,
    parse_hosts,
    parse_output,
)
from nbelastic.cli.hosts.worker import is_local
from nbelastic.errors import OptionError
from tests.support.clusters import until


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:1", {"a": 2, "b": 1}),
        ("a", {"a": 3}),
        ("a:1,a:1", {"a": 2}),
        ("user@a:2", {"user@a": 2}),
        ("[::1]:2", {"::1": 2}),
        *((name, {name: 3}) for name in ("me@gpu-1.lab_2.example", "m\xfcnchen", "w.s@a")),
    ],
)
def test_hosts_of_a_line(text, hosts):
    assert parse_hosts(text, 3) == hosts
    assert parse_output(text.replace(",", "\n"), 3) == hosts


def test_hosts_of_a_file_in_both_of_its_forms_and_of_a_script():
    text = "# two machines\na slots=2\nb:3   # the new one\n\nc\n"
    assert parse_hostfile(text) == {"a": 2, "b": 3, "c": 1}
    assert parse_output("") == {}  # no output means no hosts


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        *((parse_hosts, text, "--hosts") for text in ("", "a:b", "a:0", "a b", ":2")),
        (parse_hosts, "a:2000000000", "at most 4,096 slots"),
        (parse_hostfile, "a slots=1\nb gpus=2\n", "line 2: 'b gpus=2'"),
        (parse_output, "a:2\nerror: no such\n", "'error: no such'"),
        (parse_output, "a:4000\na:4000\n", "at most 4,096 slots"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused(parse, text, says):
    error = OptionError if parse in (parse_hosts, parse_hostfile) else DiscoveryFailed
    with pytest.raises(error, match=says):
        parse(text)


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=id", "a;reboot", "$(id)", "`id`", "a'b", "a\x1b[2J", "@a", "a" * 300]
)
def test_a_name_that_a_shell_or_a_terminal_could_act_on_is_no_host(host):
    for parse, error in ((parse_hosts, OptionError), (parse_output, DiscoveryFailed)):
        with pytest.raises(error) as raised:
            parse(f"{host}:1")
        assert len(str(raised.value)) < 250 and str(raised.value).isprintable()


def test_delays_double_while_something_fails():
    assert [delay(1.0, failures) for failures in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def test_a_host_is_this_machine_by_its_name_or_an_address():
    assert is_local("localhost") and is_local("127.0.0.1")
    assert not is_local("127.0.0.2") and not is_local("no-such-host.invalid")


# -- programs ------------------------------------------------------------------------------------


def program(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo lost >&2; exit 3", "exited with code 3: lost"),
        ("exec dd if=/dev/zero bs=1M count=64", "has printed more than 1 MiB"),
        ("seq -s ' ' 1 10000", "must be HOST"),
        ("seq -s ' ' 1 10000 >&2; exit 1", "exited with code 1"),
    ],
)
def test_a_script_that_fails_says_why_in_a_short_line(tmp_path, text, says):
    with pytest.raises(DiscoveryFailed, match=says) as raised:
        script_source(program(tmp_path, "hosts.sh", text))()
    assert len(str(raised.value)) < 300


@pytest.mark.slow
def test_a_process_that_a_script_leaves_behind_does_not_hold_it_up_unless_it_waits(tmp_path):
    """Such as the shared connection of ssh, which keeps the script's stderr open."""
    leave = f"sleep 60 & echo $! > {tmp_path}/pid; "
    try:
        script = program(tmp_path, "hosts.sh", f"{leave}echo a:2; echo b")
        assert script_source(script, slots=3, limit=2.0)() == {"a": 2, "b": 3}
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    with pytest.raises(DiscoveryFailed, match=r"has not ended after 0\.5 s"):
        script_source(program(tmp_path, "hosts.sh", f"{leave}wait"), limit=0.5)()
    number = int((tmp_path / "pid").read_text())  # what it has started ends with it
    until(lambda: not psutil.pid_exists(number) or is_dead(number), "its process has ended", 10)


def is_dead(number: int) -> bool:
    return psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_a_script_that_cannot_be_run_is_refused_at_once(tmp_path):
    with pytest.raises(OptionError, match="there is no such file"):
        script_source(str(tmp_path / "gone.sh"))
    (tmp_path / "hosts.sh").write_text("echo a")
    with pytest.raises(OptionError, match=r"chmod \+x"):
        script_source(str(tmp_path / "hosts.sh"))
