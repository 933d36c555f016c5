"""Hosts: what is present, what has changed, and when to look again."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import psutil
import pytest

from nbelastic.cli.hosts import (
    DiscoveryFailed,
    ScriptSource,
    named_source,
    parse_hostfile,
    parse_hosts,
    sources,
)
from nbelastic.cli.hosts.discovery import FailureCount, checked, parse_output
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
        (" a:1 , b:2 ", {"a": 1, "b": 2}),
    ],
)
def test_hosts_of_a_line(text, hosts):
    assert parse_hosts(text, 3) == hosts


def test_hosts_of_a_file_in_both_of_its_forms():
    text = "# two machines\na slots=2\nb:3   # the new one\n\nc\n"
    assert parse_hostfile(text) == {"a": 2, "b": 3, "c": 1}


@pytest.mark.parametrize("text", ["", "a:b", "a:0", "a b", ":2"])
def test_what_is_no_list_of_hosts_is_refused(text):
    with pytest.raises(OptionError, match="--hosts"):
        parse_hosts(text)


def test_a_line_of_a_hostfile_that_is_wrong_is_named():
    with pytest.raises(OptionError, match="line 2: 'b gpus=2'"):
        parse_hostfile("a slots=1\nb gpus=2\n")


def test_no_output_means_no_hosts_and_a_wrong_line_is_a_failure():
    assert parse_output("") == {}
    assert parse_output("\na:2\n\nb\n", 4) == {"a": 2, "b": 4}
    with pytest.raises(DiscoveryFailed, match="'error: no such'"):
        parse_output("a:2\nerror: no such\n")


ODD = [
    "-oProxyCommand=id",
    "a;reboot",
    "$(id)",
    "`id`",
    "a|b",
    "a'b",
    "a\x1b[2J",
    "a\x00",
    "@a",
    "a@",
]


@pytest.mark.parametrize("host", [*ODD, "a" * 300])
def test_a_name_that_a_shell_or_a_terminal_could_act_on_is_no_host(host):
    for parse, error in ((parse_hosts, OptionError), (parse_output, DiscoveryFailed)):
        with pytest.raises(error) as raised:
            parse(f"{host}:1")
        assert len(str(raised.value)) < 250 and str(raised.value).isprintable()
    with pytest.raises(DiscoveryFailed):
        checked({host: 1})


@pytest.mark.parametrize(
    "host",
    [
        "me@gpu-1.lab_2.example",
        "10.0.0.7",
        "m\N{LATIN SMALL LETTER U WITH DIAERESIS}nchen",
        "w.s@a",
    ],
)
def test_names_of_hosts_are_hosts(host):
    assert parse_hosts(f"{host}:1") == parse_output(host) == checked({host: 1}) == {host: 1}


def test_a_number_of_slots_that_no_machine_has_is_refused():
    with pytest.raises(OptionError, match="at most 4,096 slots"):
        parse_hosts("a:2000000000")
    with pytest.raises(DiscoveryFailed, match="at most 4,096 slots"):
        parse_output("a:4000\na:4000\n")
    for slots in (-1, "2", None, 5000):
        with pytest.raises(DiscoveryFailed, match="slots"):
            checked({"a": slots})


def test_delays_double_while_something_fails_and_start_anew():
    count = FailureCount(1.0)
    delays = []
    for _ in range(7):
        delays.append(count.delay())
        count.failed()
    assert delays == [1, 2, 4, 8, 16, 30, 30]
    count.succeeded()
    assert count.delay() == 1


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
def test_a_script_prints_the_hosts(tmp_path):
    source = ScriptSource(program(tmp_path, "hosts.sh", "echo a:2; echo b"), slots=3)
    assert source() == {"a": 2, "b": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo lost >&2; exit 3", "exited with code 3: lost"),
        ("echo 'a b'", "'a b' must be HOST"),
        ("sleep 60 & sleep 60", "has not ended after 0.2 s"),
    ],
)
def test_a_script_that_fails_says_why(tmp_path, text, says):
    source = ScriptSource(program(tmp_path, "hosts.sh", text), limit=0.2)
    with pytest.raises(DiscoveryFailed, match=says):
        source()


@pytest.mark.slow
def test_a_process_that_a_script_leaves_behind_does_not_hold_it_up(tmp_path):
    """Such as the shared connection of ssh, which keeps the script's stderr open."""
    script = program(tmp_path, "hosts.sh", f"sleep 60 & echo $! > {tmp_path}/pid; echo a:2")
    try:
        assert ScriptSource(script, limit=2.0)() == {"a": 2}
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["", ">&2"])
def test_a_script_that_prints_without_end_is_ended(tmp_path, where):
    script = program(tmp_path, "hosts.sh", f"exec dd if=/dev/zero bs=1M count=64 {where}")
    with pytest.raises(DiscoveryFailed, match="has printed more than 1 MiB"):
        ScriptSource(script)()


@pytest.mark.slow
def test_a_long_line_is_cut_in_the_error(tmp_path):
    for text in ("seq -s ' ' 1 10000", "seq -s ' ' 1 10000 >&2; exit 1"):
        with pytest.raises(DiscoveryFailed) as raised:
            ScriptSource(program(tmp_path, "hosts.sh", text))()
        assert len(str(raised.value)) < 300


@pytest.mark.slow
def test_what_a_script_has_started_ends_with_it(tmp_path):
    script = program(tmp_path, "hosts.sh", f"sleep 60 & echo $! > {tmp_path}/pid; wait")
    with pytest.raises(DiscoveryFailed, match="has not ended"):
        ScriptSource(script, limit=0.5)()
    number = int((tmp_path / "pid").read_text())
    until(lambda: not psutil.pid_exists(number) or is_dead(number), "its process has ended", 10)


def is_dead(number: int) -> bool:
    return psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_a_script_that_cannot_be_run_is_refused_at_once(tmp_path):
    with pytest.raises(OptionError, match="there is no such file"):
        ScriptSource(str(tmp_path / "gone.sh"))
    (tmp_path / "hosts.sh").write_text("echo a")
    with pytest.raises(OptionError, match=r"chmod \+x"):
        ScriptSource(str(tmp_path / "hosts.sh"))


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """A folder whose programs come first."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.mark.slow
def test_slurm_gives_the_nodes_that_live(path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    program(
        path,
        "scontrol",
        'case "$*" in\n'
        '"show job --oneliner 17") echo "JobId=17 NodeList=n[1-3] NtasksPerN:B:S:C=2:0:*:*";;\n'
        '"show hostnames n[1-3]") printf "n1\\nn2\\nn3\\n";;\n'
        "*) exit 1;; esac",
    )
    program(path, "sinfo", "echo n2")
    assert sources.slurm("", 1)() == {"n1": 2, "n3": 2}
    with pytest.raises(DiscoveryFailed, match="scontrol exited with code 1"):
        sources.slurm("18", 1)()


def test_slurm_outside_an_allocation_is_refused(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(OptionError, match="slurm:JOB"):
        sources.slurm("", 1)


@pytest.mark.slow
def test_aws_gives_the_healthy_instances(path):
    program(
        path,
        "aws",
        """case "$*" in
*"describe-auto-scaling-groups --auto-scaling-group-names gpus")
  echo '{"AutoScalingGroups": [{"Instances": [
  {"InstanceId": "i-1", "LifecycleState": "InService", "HealthStatus": "Healthy"},
  {"InstanceId": "i-2", "LifecycleState": "Terminating", "HealthStatus": "Healthy"}]}]}';;
*"describe-instances --instance-ids i-1") echo '{"Reservations": [{"Instances": [
  {"PrivateIpAddress": "10.0.0.7", "State": {"Name": "running"}}]}]}';;
*) echo '{"AutoScalingGroups": []}';;
esac""",
    )
    assert sources.aws_asg("gpus", 4)() == {"10.0.0.7": 4}
    with pytest.raises(DiscoveryFailed, match="no Auto Scaling group 'cpus'"):
        sources.aws_asg("cpus", 4)()


@pytest.mark.slow
def test_kubernetes_gives_the_ready_pods_with_their_gpus(path):
    ready = '"conditions": [{"type": "Ready", "status": "True"}]'
    gpus = '[{"resources": {"limits": {"nvidia.com/gpu": "2"}}}]'
    pods = [
        f'{{"status": {{"podIP": "10.1.0.1", {ready}}}, "spec": {{"containers": {gpus}}}}}',
        f'{{"status": {{"podIP": "10.1.0.2", {ready}}}, "spec": {{"containers": [{{}}]}}}}',
        f'{{"metadata": {{"deletionTimestamp": ""}}, "status": {{"podIP": "10.1.0.3", {ready}}}}}',
        '{"status": {"podIP": "10.1.0.4"}}',
    ]
    program(path, "kubectl", f"echo '{{\"items\": [{', '.join(pods)}]}}'")
    assert sources.k8s("app=trainer", 1)() == {"10.1.0.1": 2, "10.1.0.2": 1}


@pytest.mark.slow
def test_a_program_that_is_missing_or_prints_nonsense_is_a_failure(path, monkeypatch):
    program(path, "kubectl", "echo nonsense")
    with pytest.raises(DiscoveryFailed, match="kubectl printed no JSON"):
        sources.k8s("app=x", 1)()
    monkeypatch.setenv("PATH", str(path))
    with pytest.raises(DiscoveryFailed, match="aws cannot be run"):
        sources.aws_asg("gpus", 1)()


def test_sources_are_entry_points(monkeypatch):
    class Entry:
        name = "rack"

        def load(self):
            return lambda which, slots: lambda: {which: slots}

    monkeypatch.setattr(sources, "entry_points", lambda group: [Entry()])
    assert named_source("rack:7", 2)() == {"7": 2}
    with pytest.raises(OptionError, match="no source 'rak'; did you mean rack"):
        named_source("rak")
