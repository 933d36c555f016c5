"""The command as a process on a pseudo-terminal: what is shown, Ctrl-C, and what is left."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios

import psutil
import pytest

from tests.support.clusters import until

from .stage import SCRIPT, Terminal

pytestmark = pytest.mark.slow

# Its two workers are forked from one process that has imported torch.
MAIN = "import tests.support.forking; from nbelastic.cli.entry import main; main()"
RUN = [sys.executable, "-c", MAIN, "run", "-H", "localhost:2", "-np", "2"]


@pytest.fixture
def end_of(tmp_path):
    """Run a command until an epoch is over, end it somehow, and return its exit code."""

    def run(end, stream, **more) -> int:
        words = [*RUN, str(SCRIPT), "--log", str(tmp_path / "log"), "--sizes", "2,9"]
        more = {"stdin": stream, "stdout": stream, "start_new_session": True, **more}
        environment = {**os.environ, "TERM": "xterm"}
        process = subprocess.Popen(words, stderr=subprocess.STDOUT, env=environment, **more)
        try:
            until((tmp_path / "log").exists, "an epoch is over", 90)
            children = psutil.Process(process.pid).children(recursive=True)
            end(process)
            code = process.wait(60)
        finally:
            process.kill()
        assert len(children) >= 2
        assert not psutil.wait_procs(children, timeout=30)[1], "nothing is left"
        return code

    return run


def test_ctrl_c_on_a_terminal_stops_at_the_next_commit_and_leaves_nothing(end_of):
    terminal = Terminal(100)

    def interrupt(process) -> None:  # as a terminal does for Ctrl-C
        until(lambda: "running" in terminal.text, "the view has followed")
        os.killpg(process.pid, signal.SIGINT)

    code = end_of(interrupt, terminal.stream)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.close())
    assert code == 130, text
    assert "2/2 ranks" in text
    assert "stopping at the next commit; interrupt again to stop now" in text
    assert "Traceback" not in text


def test_a_terminal_that_is_closed_interrupts_the_job(end_of):
    terminal = Terminal(80)

    def in_front_of_it() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def hang_up(process) -> None:  # as the system does when the terminal goes
        terminal.stream.close()
        os.killpg(process.pid, signal.SIGHUP)
        os.close(terminal.master)

    assert end_of(hang_up, terminal.stream, preexec_fn=in_front_of_it) == 130


PRINTS = """
import sys, torch, nbelastic.torch as hvd
hvd.init()
print("rank", hvd.rank(), float(hvd.allreduce(torch.ones(1))))
open(sys.argv[1], "a").write("trained")
"""


def test_output_to_a_full_disk_is_said_and_the_exit_code_is_not_0(tmp_path):
    script = tmp_path / "prints.py"
    script.write_text(PRINTS)
    words = [*RUN, "--json", str(script), str(tmp_path / "log")]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=90, check=False
        )
    assert ended.returncode == 1, ended.stderr
    assert "<stdout> takes no more: No space left on device; the job goes on" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "log").read_text(), "it has trained"
