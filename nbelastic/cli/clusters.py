"""The cluster that a command's options name, opened and closed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nbelastic.errors import OptionError

from .hosts.cluster import HostCluster
from .hosts.discovery import (
    DiscoveryFailed,
    Hosts,
    Source,
    parse_hostfile,
    parse_hosts,
    parse_output,
)
from .hosts.worker import is_local

HOST_OPTIONS = ("hosts", "hostfile", "host_discovery_script")  # one at most
NAMING = ("scheduler", "scheduler_file", *HOST_OPTIONS)  # one at most


def existing(options: Mapping[str, Any]) -> str | None:
    """Return the address of the scheduler that options name; None if they name none."""
    address: str | None = options.get("scheduler")
    file = options.get("scheduler_file")
    if not file:
        return address
    try:
        with open(file, encoding="utf-8") as opened_file:
            return str(json.load(opened_file)["address"])
    except (OSError, ValueError, KeyError, TypeError):
        raise OptionError(f"--scheduler-file {file!r}: must be the file of a scheduler") from None


@contextlib.contextmanager
def opened(options: Mapping[str, Any], tell: Callable[[str], None]) -> Iterator[Any]:
    """Yield a value for ``fit``'s ``cluster=``, and afterwards close a cluster started here.

    `tell` takes a line for the user.
    """
    named = {
        f"--{name.replace('_', '-')}": options[name]
        for name in NAMING
        if options.get(name) is not None
    }
    for flag, value in named.items():
        if not value:  # as with a variable of the shell that is not set
            raise OptionError(f"{flag}: its value is empty")
    if len(named) > 1:
        raise OptionError(f"{' and '.join(named)}: give one of them; each names the machines")
    address = existing(options)
    if address is not None or not named:
        yield address
    else:
        with _of_hosts(options, tell) as cluster:
            yield cluster


def _of_hosts(options: Mapping[str, Any], tell: Callable[[str], None]) -> HostCluster:
    source, fixed = _source(options, int(options.get("slots_per_host") or 1))
    others = [host for host in fixed or () if not is_local(host)]
    if others and importlib.util.find_spec("asyncssh") is None:
        raise OptionError(
            f"{others[0]} is another machine, and ssh needs asyncssh: pip install 'nbelastic[ssh]'"
        )
    ssh: dict[str, Any] = {}
    if port := options.get("ssh_port"):
        ssh["port"] = port
    if key := options.get("ssh_identity_file"):
        ssh["client_keys"] = [key]
    try:
        return HostCluster(
            source,
            interval=float(options.get("discovery_interval") or 1.0),
            ssh=ssh,
            python=options.get("remote_python") or sys.executable,
            tell=tell,
            loopback=fixed is not None and not others,
        )
    except DiscoveryFailed as error:
        raise DiscoveryFailed(f"host discovery failed at the first time: {error}") from None


def _source(options: Mapping[str, Any], slots: int) -> tuple[Source, Hosts | None]:
    """Return the source of hosts, and the hosts if they stay the same."""
    if script := options.get("host_discovery_script"):
        return script_source(script, slots), None
    if options.get("hosts"):
        fixed = parse_hosts(options["hosts"], slots)
    else:
        with open(options["hostfile"], encoding="utf-8", errors="replace") as file:
            fixed = parse_hostfile(file.read(), slots)
    return (lambda: fixed), fixed


# -- the discovery script ------------------------------------------------------------------------

TIME_LIMIT = 30.0  # seconds that a program has to print the hosts
MOST_BYTES = 2**20  # most bytes that a program may print
POLL = 0.05  # seconds between two looks whether a program has ended
LONGEST_ERROR = 200


def _output(program: str, limit: float) -> str:
    """Return a program's output; a program that prints or runs too long is killed."""
    name = os.path.basename(program)
    deadline = time.monotonic() + limit
    # Files, not pipes: a process that the program leaves in the background keeps its output open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [program],
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


def script_source(path: str, slots: int = 1, limit: float = TIME_LIMIT) -> Source:
    """Return the source of a script that prints hosts, a line each: ``NAME`` or ``NAME:SLOTS``."""
    file = os.path.abspath(os.path.expanduser(path))
    if not os.path.isfile(file):
        raise OptionError(f"--host-discovery-script {path!r}: there is no such file")
    if not os.access(file, os.X_OK):
        raise OptionError(f"--host-discovery-script {path!r}: must be executable: chmod +x {path}")
    return lambda: parse_output(_output(file, limit), slots)
