"""The command as a process on a pseudo-terminal: what is shown, Ctrl-C, and what is left."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import psutil
import pytest

from tests.support.clusters import until

from .stage import SCRIPT

pytestmark = pytest.mark.slow

# Its two workers are forked from one process that has imported torch.
MAIN = "import tests.support.forking; from nbelastic.cli.entry import main; main()"
RUN = [sys.executable, "-c", MAIN, "run", "-H", "localhost:2", "-np", "2"]


def command(tmp_path, *options: str) -> list[str]:
    return [*RUN, *options, str(SCRIPT), "--log", str(tmp_path / "log"), "--sizes", "2,9"]


def wait_for_end(process: subprocess.Popen, children: list[psutil.Process]) -> int:
    code = process.wait(60)
    _, left = psutil.wait_procs(children, timeout=30)
    assert not left
    return code


def test_ctrl_c_on_a_terminal_stops_at_the_next_commit_and_leaves_nothing(tmp_path):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))

    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        command(tmp_path),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
    )
    os.close(slave)
    shown = b""
    children: list[psutil.Process] = []
    asked = False
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            shown += os.read(master, 65536)
        except OSError:
            break
        if not asked and b"running" in shown and (tmp_path / "log").exists():
            children = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does for Ctrl-C
            asked = True
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert wait_for_end(process, children) == 130, text
    assert len(children) >= 2
    assert "2/2 ranks" in text and "░" in text
    assert "stopping at the next commit; interrupt again to stop now" in text
    assert "Traceback" not in text


def test_sigterm_without_a_terminal_ends_the_command_and_leaves_nothing(tmp_path):
    errors = tmp_path / "errors"
    with open(errors, "w") as file:
        process = subprocess.Popen(
            command(tmp_path, "--prefix-output"), stdout=file, stderr=file, start_new_session=True
        )
    try:
        until((tmp_path / "log").exists, "an epoch is over", 90)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        code = wait_for_end(process, children)
    finally:
        process.kill()
    text = errors.read_text()
    assert code == 130, text
    assert "Rank 1 has joined" in text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f]", text)
