"""Sources of hosts: a discovery script, and services of clusters and clouds.

Those of the entry point group ``nbelastic.hosts`` are made by a function that takes the text after
the colon of ``--hosts-from NAME:TEXT`` and the slots of a host without a number.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, cast

from nbelastic.driver.parser import did_you_mean
from nbelastic.errors import OptionError

from .discovery import DiscoveryFailed, Hosts, Source, parse_output

GROUP = "nbelastic.hosts"  # entry points that make sources
TIME_LIMIT = 30.0  # seconds that a program has to print the hosts
MOST_BYTES = 2**20  # most bytes that a program may print
POLL = 0.05  # seconds between two looks whether a program has ended
LONGEST_ERROR = 200


def _output(command: Sequence[str], limit: float = TIME_LIMIT) -> str:
    """Return a program's output; a program that prints or runs too long is killed."""
    name = os.path.basename(command[0])
    deadline = time.monotonic() + limit
    # Files, not pipes: a process that the program leaves in the background keeps its output open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            raise DiscoveryFailed(f"{name} cannot be run: {error.strerror or error}") from None
        code: int | None = None
        try:
            while code is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(POLL)
                if sum(os.fstat(file.fileno()).st_size for file in (output, errors)) > MOST_BYTES:
                    raise DiscoveryFailed(f"{name} has printed more than {MOST_BYTES >> 20} MiB")
                if code is None and time.monotonic() > deadline:
                    raise DiscoveryFailed(f"{name} has not ended after {limit:g} s")
        finally:
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for file in (output, errors):
            file.seek(0)
        printed, complaints = (file.read().decode(errors="replace") for file in (output, errors))
    if code:
        last = complaints.strip().splitlines()[-1:] or ["it printed no error"]
        raise DiscoveryFailed(f"{name} exited with code {code}: {last[0][:LONGEST_ERROR]}")
    return printed


def _read(command: Sequence[str]) -> Any:
    try:
        return json.loads(_output(command))
    except json.JSONDecodeError as error:
        name = os.path.basename(command[0])
        raise DiscoveryFailed(f"{name} printed no JSON: {error}") from None


def script_source(path: str, slots: int = 1, limit: float = TIME_LIMIT) -> Source:
    """Return the source of a script that prints hosts, a line each: ``NAME`` or ``NAME:SLOTS``."""
    file = os.path.abspath(os.path.expanduser(path))
    if not os.path.isfile(file):
        raise OptionError(f"--host-discovery-script {path!r}: there is no such file")
    if not os.access(file, os.X_OK):
        raise OptionError(f"--host-discovery-script {path!r}: must be executable: chmod +x {path}")
    return lambda: parse_output(_output([file], limit), slots)


def named_source(text: str, slots: int = 1) -> Source:
    """Return the source of ``--hosts-from NAME[:WHICH]``."""
    name, _, which = text.partition(":")
    found = {each.name: each for each in entry_points(group=GROUP)}
    if name not in found:
        hint = did_you_mean(name, found) or f"; there are {', '.join(sorted(found)) or 'none'}"
        raise OptionError(f"--hosts-from {text!r}: there is no source {name!r}{hint}")
    make = cast("Callable[[str, int], Source]", found[name].load())
    return make(which, slots)


# -- SLURM ---------------------------------------------------------------------------------------


def slurm(which: str, slots: int) -> Source:
    """Return a source of the live nodes of an allocation, by default of this one."""
    job = which or os.environ.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        raise OptionError(
            f"--hosts-from slurm{':' if which else ''}{which}: must be used within an allocation "
            "of SLURM, or name one: slurm:JOB"
        )

    def find() -> Hosts:
        described = _output(["scontrol", "show", "job", "--oneliner", job])
        nodes = re.search(r"\bNodeList=(\S+)", described)
        if nodes is None or nodes[1] == "(null)":
            return {}
        tasks = re.search(r"\bNtasksPerN:B:S:C=(\d+)", described)
        per_node = int(tasks[1]) if tasks and int(tasks[1]) else slots
        listed = _output(["scontrol", "show", "hostnames", nodes[1]])
        down = _output(["sinfo", "--noheader", "--dead", "--Node", "--format=%N"])
        dead = set(down.split())
        return {node: per_node for node in listed.split() if node not in dead}

    return find


# -- clouds --------------------------------------------------------------------------------------


def aws_asg(which: str, slots: int) -> Source:
    """Return a source of the healthy instances of an Auto Scaling group, by private address."""
    if not which:
        raise OptionError("--hosts-from aws-asg: the group's name must follow, as in aws-asg:gpus")
    aws = ["aws", "--output", "json"]

    def find() -> Hosts:
        describe = [*aws, "autoscaling", "describe-auto-scaling-groups"]
        groups = _read([*describe, "--auto-scaling-group-names", which])
        if not groups.get("AutoScalingGroups"):
            raise DiscoveryFailed(f"there is no Auto Scaling group {which!r}")
        present = [
            instance["InstanceId"]
            for group in groups["AutoScalingGroups"]
            for instance in group["Instances"]
            if (instance["LifecycleState"], instance["HealthStatus"]) == ("InService", "Healthy")
        ]
        if not present:
            return {}
        described = _read([*aws, "ec2", "describe-instances", "--instance-ids", *present])
        return {
            instance["PrivateIpAddress"]: slots
            for reservation in described["Reservations"]
            for instance in reservation["Instances"]
            if instance["State"]["Name"] == "running" and "PrivateIpAddress" in instance
        }

    return find


def k8s(which: str, slots: int) -> Source:
    """Return a source of the ready pods of a label selector, by address."""
    if not which:
        raise OptionError("--hosts-from k8s: a selector must follow, as in k8s:app=trainer")

    def find() -> Hosts:
        listed = _read(["kubectl", "get", "pods", "--selector", which, "--output", "json"])
        return {
            pod["status"]["podIP"]: _gpus(pod) or slots for pod in listed["items"] if _ready(pod)
        }

    return find


def _ready(pod: Any) -> bool:
    status = pod.get("status", {})
    conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
    terminating = "deletionTimestamp" in pod.get("metadata", {})
    return "podIP" in status and conditions.get("Ready") == "True" and not terminating


def _gpus(pod: Any) -> int:
    limits = [
        container.get("resources", {}).get("limits", {}) for container in pod["spec"]["containers"]
    ]
    return sum(int(each.get("nvidia.com/gpu", 0)) for each in limits)
