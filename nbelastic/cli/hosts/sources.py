"""Discovery script: a program that prints the present hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time

from nbelastic.errors import OptionError

from .discovery import DiscoveryFailed, Source, parse_output

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
