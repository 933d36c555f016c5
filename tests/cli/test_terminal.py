"""The command as a process on a pseudo-terminal: what is shown, Ctrl-C, and what is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
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
    assert "2/2 ranks" in text
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


PRINTS = """
import sys, torch, nbelastic.torch as hvd
hvd.init()
print("rank", hvd.rank(), float(hvd.allreduce(torch.ones(1))))
open(sys.argv[1], "a").write("trained")
"""


@pytest.mark.parametrize("style", [["--plain"], ["--json"]])
def test_output_to_a_full_disk_is_said_and_the_exit_code_is_not_0(tmp_path, style):
    script = tmp_path / "prints.py"
    script.write_text(PRINTS)
    words = [*RUN, *style, str(script), str(tmp_path / "log")]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=90, check=False
        )
    assert ended.returncode == 1, ended.stderr
    assert "<stdout> takes no more: No space left on device; the job goes on" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "log").read_text(), "it has trained"


@pytest.mark.parametrize("style", [[], ["nohup"]])
def test_a_terminal_that_is_closed_interrupts_the_job_unless_hangups_are_ignored(tmp_path, style):
    nohup = "nohup" in style

    def in_front_of_it() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)

    master, slave = pty.openpty()
    output = os.open(tmp_path / "nohup.out", os.O_CREAT | os.O_WRONLY)
    process = subprocess.Popen(
        [*command(tmp_path, *style[nohup:]), *(["--sizes", "2,2"] if nohup else [])],
        stdin=slave,
        stdout=output if nohup else slave,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
        preexec_fn=in_front_of_it,  # noqa: PLW1509 (no threads yet)
    )
    os.close(slave)
    os.close(output)
    try:
        reader = threading.Thread(target=_read_all, args=(master,), daemon=True)
        reader.start()
        until((tmp_path / "log").exists, "an epoch is over", 90)
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGHUP)  # as the system does when the terminal goes
        os.close(master)
        code = wait_for_end(process, children)
    finally:
        process.kill()
    assert code == (0 if nohup else 130)
    assert len((tmp_path / "log").read_text().splitlines()) == 1 + nohup, "it went on"


def _read_all(terminal: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(terminal, 65536):
            pass
