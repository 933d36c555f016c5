"""Processes of ranks: how they start and end, what they print, and that nothing of them stays."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import cloudpickle
import psutil
import pytest

from nbelastic.cluster.worker import rank_process
from nbelastic.messages import RankEvent, RankRaised, RankTelemetry
from tests.support.rank_processes import Host, is_there, until

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import the tests


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A host whose template no other test has. Nothing is left of all ranks of this module."""
    with Host.alone("processes") as made:
        made.run(lambda: None)
        made.do(until(lambda: not remains(made)[2]))  # the server ends after its rank
        before = remains(made)
        yield made

        def nothing_new() -> bool:
            files, ours, theirs, template = remains(made)
            return files <= before[0] and ours <= before[1] and not theirs and template <= before[3]

        made.do(until(nothing_new))


def remains(host: Host) -> tuple[set[str], set[int], set[int], int]:
    """Return descriptors, children, the template's children and the number of its descriptors."""
    ours = {child.pid for child in psutil.Process().children()}
    theirs = {child.pid for child in psutil.Process(host.launcher.template).children()}
    return open_files(), ours, theirs, len(os.listdir(f"/proc/{host.launcher.template}/fd"))


def open_files(pid: int | str = "self") -> set[str]:
    found = set()
    for each in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            found.add(f"{each} {os.readlink(f'/proc/{pid}/fd/{each}')}")
    return found


# -- starts and ends -------------------------------------------------------------------------------


def test_nothing_of_the_worker_is_in_it(host: Host) -> None:
    """It has its standard streams, its channel; what it starts, the first."""

    def function() -> tuple[set[str], list[str], int, bool]:
        words = ["sh", "-c", "ls -l /proc/$$/fd"]
        child = subprocess.run(
            words, close_fds=False, stdout=subprocess.PIPE, text=True, check=True
        )
        theirs = [line.split()[-3] for line in child.stdout.splitlines() if "->" in line]
        main = threading.current_thread() is threading.main_thread()
        return open_files(), theirs, threading.active_count(), main

    with open(os.devnull) as mine:
        os.set_inheritable(mine.fileno(), True)
        rank, _ = host.run(function)
    files, theirs, threads, in_main_thread = rank.result
    kinds = sorted(each.split()[1].partition(":")[0] for each in files)
    assert [kind for kind in kinds if kind in ("socket", "pipe")] == ["pipe", "pipe", "socket"]
    assert theirs == ["0", "1", "2"]
    assert threads == 3 and in_main_thread  # with those of the channel


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os._exit(3), "exited with status 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by signal 9 (SIGKILL)"),
        (lambda: os.kill(os.getpid(), signal.SIGRTMIN), f"{int(signal.SIGRTMIN)} (SIGRTMIN)"),
    ],
)
def test_how_a_process_has_ended_is_said(host: Host, end: Any, words: str) -> None:
    rank, exit_ = host.run(end)
    assert rank.last is None
    assert words in str(exit_)


def crash() -> None:
    ctypes.string_at(0)  # the line


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_fatal_signal_is_explained_with_the_line_of_the_user(host: Host, in_thread: bool) -> None:
    def function() -> None:
        if in_thread:
            thread = threading.Thread(target=crash)
            thread.start()
            thread.join()
        crash()

    rank, exit_ = host.run(function)
    assert str(exit_) == "its process was killed by signal 11 (SIGSEGV)"
    assert rank.output.startswith("Fatal Python error: Segmentation fault\n")
    assert f'File "{__file__}", line {crash.__code__.co_firstlineno + 1} in crash' in rank.output


def test_sigterm_of_a_batch_system_is_the_workers_and_sys_exit_an_error(host: Host) -> None:
    def function() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        sys.exit(3)

    rank, exit_ = host.run(function)
    assert isinstance(rank.last.event, RankRaised)
    assert "SystemExit" in rank.last.event.error
    assert exit_.status == 0


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_its_own_processes_work_in_any_start_method(host: Host, method: str) -> None:
    def function() -> list[int]:
        with multiprocessing.get_context(method).Pool(1) as pool:
            return pool.map(abs, [-1, -2])

    rank, _ = host.run(function)
    assert rank.result == [1, 2]


# -- output ----------------------------------------------------------------------------------------


def test_output_is_in_order_with_messages(host: Host) -> None:
    """What comes from Python, C and a child, and what was printed before an event, before it."""

    def function() -> None:
        from nbelastic.elastic.ranks.context import current
        from nbelastic.messages import RankNote

        libc = ctypes.CDLL(None)
        print("python", end=" ", flush=True)
        libc.printf(b"C ")
        libc.fflush(None)
        subprocess.run(["printf", "child "], check=True)
        os.write(2, b"stderr\n")
        print("in the line", end=" ")
        current().report(RankNote(0, "warning", "in between"))  # type: ignore[attr-defined]
        print("after")

    rank, _ = host.run(function)
    came = [each for each in rank.came if not isinstance(each, RankTelemetry)]
    events = [n for n, each in enumerate(came) if isinstance(each, RankEvent)]
    assert len(events) == 2
    before = b"".join(each for each in came[: events[0]] if isinstance(each, bytes))
    between = b"".join(each for each in came[events[0] : events[1]] if isinstance(each, bytes))
    first = b"python C child stderr\nin the line "
    assert before.startswith(first)  # what it printed just after may be here
    assert before + between == first + b"after\n"


def test_a_child_that_keeps_the_pipe_and_the_channel_does_not_hold_up_the_end(host: Host) -> None:
    def function() -> int:
        pid = os.fork()
        if not pid:
            os.setsid()
            while True:
                time.sleep(0.05)
                os.write(1, b"child\n")
        return pid

    rank, exit_ = host.run(function)
    assert exit_.status == 0
    seen = len(rank.came)
    host.do(until(lambda: not is_there(rank.result)))
    assert len(rank.came) == seen


def test_a_child_may_end_after_the_function_and_is_ended_with_it_otherwise(host: Host) -> None:
    def function(go: str, raises: bool = False) -> int:
        words = f"cat; while ! [ -e {go} ]; do sleep 0.02; done; echo done"
        child = subprocess.Popen(["sh", "-c", words], stdin=subprocess.PIPE)  # closed at the end
        print(child.pid, "end", flush=True)
        return child.pid // (not raises)

    for go, ends in (("", ""), ("/", "done\n")):
        rank = host.launch(function, go or "/none")
        host.do(until(lambda rank=rank: rank.last is not None))
        if not go:
            host.loop.call_soon(rank.process.send_signal, signal.SIGTERM, "late")
        exit_ = host.do(rank.end())
        assert (exit_.reason, rank.output.endswith(ends)) == ("" if go else "late", True)
        assert not is_there(rank.result)
    rank, _ = host.run(function, "/none", True)
    host.do(until(lambda: not is_there(int(rank.output.split()[0]))))


# -- the end of the server, and of the worker ------------------------------------------------------


def with_child() -> None:
    child = subprocess.Popen(["sleep", "60"])
    print(f"pids {os.getpid()} {child.pid} end", flush=True)
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["another system", "threads"])
def test_where_forking_is_not_safe_a_rank_imports_torch_itself(monkeypatch, tmp_path, why):
    if why == "threads":
        code = "import _thread, os, time; begin = _thread.start_new_thread\n"
        code += "os.register_at_fork(after_in_child=lambda: begin(time.sleep, (300,)))\n"
        (tmp_path / "sitecustomize.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setenv("NBELASTIC_PORTABLE", "1")
        monkeypatch.setattr(rank_process, "LINUX", False)
    with Host.alone("bare") as host:
        rank, exit_ = host.run(lambda: (print("printed"), os.getpid())[1])
        assert (rank.result, rank.output, exit_.status) == (rank.process.pid, "printed\n", 0)
        with open(f"/proc/{host.launcher.template}/maps") as maps:
            assert "libtorch" not in maps.read()
        for reason in ("its rank server has ended", "its worker was closed"):
            rank = host.launch(with_child)
            host.do(rank.printed(" end"))
            if "server" in reason:
                os.kill(rank.process.server, signal.SIGKILL)
            else:
                host.do(host.launcher.close())
            assert str(host.do(rank.end())) == reason
            host.do(until(lambda rank=rank: not any(map(is_there, rank.pids))))
