"""Sources of hosts: a discovery script, and services of clusters and clouds.

A source returns the slots of each present host, and raises :class:`DiscoveryFailed` where that is
unknown. Every program that it calls has a time limit. Those of the entry point group
``nbelastic.hosts`` are made by a function that takes the text after the colon of ``--hosts-from
NAME:TEXT`` and the slots of a host without a number.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import time
from importlib.metadata import entry_points
from typing import IO, TYPE_CHECKING, Any, cast

from nbelastic.driver.hints import did_you_mean
from nbelastic.errors import OptionError

from .discovery import DiscoveryFailed, parse_output

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .discovery import Hosts, Source

GROUP = "nbelastic.hosts"
"""Entry points that make sources."""

TIME_LIMIT = 30.0
"""Seconds that a program has to print the hosts."""


MOST_BYTES = 2**20
"""Most bytes that a program may print."""

POLL = 0.05
"""Seconds between two looks whether a program has ended."""

LONGEST_ERROR = 200


def _output(command: Sequence[str], limit: float) -> str:
    """Return what a program prints until it ends.

    A process that it leaves in the background may keep its output open: that is not waited for. One
    that takes too long, or prints without end, is ended with all that it has started.
    """
    name = os.path.basename(command[0])
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise DiscoveryFailed(f"{name} cannot be run: {error.strerror or error}") from None
    with process:
        try:
            output, errors = _collect(process, name, limit)
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last = errors.strip().splitlines()[-1:] or ["it printed no error"]
        raise DiscoveryFailed(
            f"{name} exited with code {process.returncode}: {last[0][:LONGEST_ERROR]}"
        )
    return output


def _collect(process: subprocess.Popen[bytes], name: str, limit: float) -> tuple[str, str]:
    """Read what a program prints to stdout and stderr, until it ends."""
    deadline = time.monotonic() + limit
    pieces: dict[IO[bytes], list[bytes]] = {}
    with selectors.DefaultSelector() as open_pipes:
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pieces[pipe] = []
            os.set_blocking(pipe.fileno(), False)
            open_pipes.register(pipe, selectors.EVENT_READ)
        over = False
        while not over:
            over = process.poll() is not None  # what it has printed is in the pipes: read once more
            ready = [
                cast("IO[bytes]", key.fileobj) for key, _ in open_pipes.select(0 if over else POLL)
            ]
            while ready:
                for pipe in ready:
                    piece = os.read(pipe.fileno(), 65536)
                    pieces[pipe].append(piece)
                    if not piece:
                        open_pipes.unregister(pipe)
                if sum(len(each) for found in pieces.values() for each in found) > MOST_BYTES:
                    raise DiscoveryFailed(f"{name} has printed more than {MOST_BYTES >> 20} MiB")
                ready = [cast("IO[bytes]", key.fileobj) for key, _ in open_pipes.select(0)]
            if not over and time.monotonic() > deadline:
                raise DiscoveryFailed(f"{name} has not ended after {limit:g} s")
            if not open_pipes.get_map():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL)
    output, errors = (b"".join(found).decode(errors="replace") for found in pieces.values())
    return output, errors


def _read(command: Sequence[str]) -> Any:
    """Return the JSON that a program prints."""
    try:
        return json.loads(_output(command, TIME_LIMIT))
    except json.JSONDecodeError as error:
        name = os.path.basename(command[0])
        raise DiscoveryFailed(f"{name} printed no JSON: {error}") from None


class ScriptSource:
    """Hosts that a discovery script prints, a line each: ``NAME`` or ``NAME:SLOTS``.

    Parameters
    ----------
    path : str
        The script. It is run as a program of its own.
    slots : int
        Slots of a host without a number.
    limit : float
        Seconds that it has.
    """

    def __init__(self, path: str, slots: int = 1, limit: float = TIME_LIMIT) -> None:
        self._path = os.path.abspath(os.path.expanduser(path))
        self._slots = slots
        self._limit = limit
        if not os.path.isfile(self._path):
            raise OptionError(f"--host-discovery-script {path!r}: there is no such file")
        if not os.access(self._path, os.X_OK):
            raise OptionError(
                f"--host-discovery-script {path!r}: must be executable: chmod +x {path}"
            )

    def __call__(self) -> Hosts:
        """Run the script and return the hosts."""
        return parse_output(_output([self._path], self._limit), self._slots)


def named_source(text: str, slots: int = 1) -> Source:
    """Return the source of ``--hosts-from NAME[:WHICH]``.

    Parameters
    ----------
    text : str
        The option's value.
    slots : int
        Slots of a host without a number.

    Raises
    ------
    OptionError
        There is no source of this name; or it does not take what follows the name.
    """
    name, _, which = text.partition(":")
    found = {each.name: each for each in entry_points(group=GROUP)}
    if name not in found:
        hint = did_you_mean(name, found) or f"; there are {', '.join(sorted(found)) or 'none'}"
        raise OptionError(f"--hosts-from {text!r}: there is no source {name!r}{hint}")
    make = cast("Callable[[str, int], Source]", found[name].load())
    return make(which, slots)


# -- SLURM ---------------------------------------------------------------------------------------


def slurm(which: str, slots: int) -> Source:
    """Return a source of the nodes of this SLURM allocation that have not failed.

    Parameters
    ----------
    which : str
        A job's number; that of this allocation by default.
    slots : int
        Slots of a node, where the allocation does not say how many tasks it runs.
    """
    job = which or os.environ.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        raise OptionError(
            f"--hosts-from slurm{':' if which else ''}{which}: must be used within an allocation "
            "of SLURM, or name one: slurm:JOB"
        )

    def find() -> Hosts:
        described = _output(["scontrol", "show", "job", "--oneliner", job], TIME_LIMIT)
        nodes = re.search(r"\bNodeList=(\S+)", described)
        if nodes is None or nodes[1] == "(null)":
            return {}
        tasks = re.search(r"\bNtasksPerN:B:S:C=(\d+)", described)
        per_node = int(tasks[1]) if tasks and int(tasks[1]) else slots
        listed = _output(["scontrol", "show", "hostnames", nodes[1]], TIME_LIMIT)
        down = _output(["sinfo", "--noheader", "--dead", "--Node", "--format=%N"], TIME_LIMIT)
        dead = set(down.split())
        return {node: per_node for node in listed.split() if node not in dead}

    return find


# -- clouds --------------------------------------------------------------------------------------


def aws_asg(which: str, slots: int) -> Source:
    """Return a source of the healthy instances of an Auto Scaling group, by private address.

    Parameters
    ----------
    which : str
        The group's name.
    slots : int
        Slots of an instance.
    """
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
    """Return a source of the ready pods with some labels, by address.

    Parameters
    ----------
    which : str
        A label selector, such as ``app=trainer``.
    slots : int
        Slots of a pod that asks for no GPUs.
    """
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
