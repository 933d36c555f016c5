"""Processes of ranks: how they start and end, what they print, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil
import pytest

from nbelastic.cluster.worker import rank_launcher
from nbelastic.messages import (
    EndRank,
    RankEvent,
    RankLeft,
    RankOrder,
    RankRaised,
    RankReturned,
    RankTelemetry,
    Text,
)
from tests.support.rank_processes import Host, is_there, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import the tests


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A host whose template no other test has: its processes are counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBELASTIC_TEST", f"processes-{os.getpid()}")
        made = Host()
        yield made
        made.close()


# -- starts and ends -------------------------------------------------------------------------------


def test_a_rank_runs_its_function_in_the_main_thread_of_a_process_of_its_own(host: Host) -> None:
    def function(x: int) -> tuple[int, bool, int, int]:
        main = threading.current_thread() is threading.main_thread()
        return x + 1, main, os.getpid(), os.getppid()

    rank, exit_ = host.run(function, 41)
    answer, main, pid, parent = rank.result
    assert (answer, main, exit_.status) == (42, True, 0)
    assert (pid, parent) == (rank.process.pid, rank.process.server)
    assert rank.process.ended
    assert isinstance(rank.last.event, RankReturned)


def test_nothing_of_the_worker_is_in_it(host: Host) -> None:
    """It has its standard streams, its channel and its crash file."""
    with open(os.devnull) as mine:
        os.set_inheritable(mine.fileno(), True)

        def function() -> tuple[list[str], int]:
            names = []
            for each in os.listdir("/proc/self/fd"):
                try:
                    names.append(os.readlink(f"/proc/self/fd/{each}"))
                except OSError:
                    continue  # the folder's own
            return names, threading.active_count()

        rank, _ = host.run(function)
    names, threads = rank.result
    kinds = sorted(name.partition(":")[0] for name in names if name != os.devnull)
    assert [kind for kind in kinds if kind in ("socket", "pipe")] == ["pipe", "pipe", "socket"]
    assert threads == 3  # with those of the channel


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "exited with status 0"), (3, "exited with status 3")],
)
def test_how_a_process_has_exited_is_said(host: Host, status: int, words: str) -> None:
    rank, exit_ = host.run(lambda: os._exit(status))
    assert rank.last is None
    assert words in str(exit_)


def test_sys_exit_is_an_error_of_the_function(host: Host) -> None:
    rank, exit_ = host.run(lambda: sys.exit(3))
    assert isinstance(rank.last.event, RankRaised)
    assert exit_.status == 0


@pytest.mark.parametrize("name", ["SIGKILL", "SIGALRM", "SIGRTMIN"])
def test_the_signal_that_has_ended_it_is_named(host: Host, name: str) -> None:
    number = getattr(signal, name)
    rank, exit_ = host.run(lambda: os.kill(os.getpid(), number))
    assert rank.last is None
    assert f"killed by signal {int(number)} ({name})" in str(exit_)
    assert not exit_.crash


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

    _, exit_ = host.run(function)
    line = crash.__code__.co_firstlineno + 1
    place = f"at {__file__}, line {line}, in crash"
    assert str(exit_) == f"its process was killed by signal 11 (SIGSEGV), {place}"
    assert exit_.crash.startswith("Fatal Python error: Segmentation fault\n")
    assert f'File "{__file__}", line {line} in crash' in exit_.crash


def test_an_alarm_and_handlers_are_as_in_a_script(host: Host) -> None:
    def function() -> list[str]:
        came = []
        signal.signal(signal.SIGALRM, lambda *_: came.append("alarm"))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        signal.pause()
        return came

    rank, _ = host.run(function)
    assert rank.result == ["alarm"]


def test_terminal_signals_of_a_batch_system_are_the_workers_to_act_on(host: Host) -> None:
    def function() -> str:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)
        return "goes on"

    rank, _ = host.run(function)
    assert rank.result == "goes on"


def test_an_order_to_end_raises_where_the_function_stands(host: Host) -> None:
    def function() -> None:
        print("here", flush=True)
        while True:
            time.sleep(30)

    rank = host.launch(function)
    host.do(rank.printed("here"))
    effect = EndRank(0, "evict", Text("it was told to"))
    rank.process.send(RankOrder("job", 0, effect))
    exit_ = host.do(rank.end())
    assert isinstance(rank.last.event, RankLeft)
    assert exit_.status == 0


def test_a_rank_that_stops_itself_is_ended_with_a_reason(host: Host) -> None:
    rank = host.launch(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    host.do(until(lambda: rank.process.pid is not None and rank.process.state().state == "stopped"))
    rank.process.send_signal(signal.SIGKILL, "it was stopped")
    assert str(host.do(rank.end())) == "it was stopped"


def test_two_ranks_of_a_worker_are_two_processes(host: Host) -> None:
    def function() -> float:
        import random

        return random.random()

    ranks = [host.launch(function) for _ in range(2)]
    for rank in ranks:
        host.do(rank.end())
    assert ranks[0].process.pid != ranks[1].process.pid
    assert ranks[0].result != ranks[1].result


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_its_own_processes_work_in_any_start_method(host: Host, method: str) -> None:
    def function() -> list[int]:
        with multiprocessing.get_context(method).Pool(1) as pool:
            return pool.map(abs, [-1, -2])

    rank, _ = host.run(function)
    assert rank.result == [1, 2]


def test_a_fork_that_returns_ends_as_in_a_script(host: Host) -> None:
    def function() -> int:
        pid = os.fork()
        return pid and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    rank, _ = host.run(function)
    assert rank.result == 0
    assert len([e for e in rank.came if isinstance(e, RankEvent)]) == 1


# -- output ----------------------------------------------------------------------------------------


def test_output_is_in_order_with_messages(host: Host) -> None:
    """What comes from Python, C and a child, and what was printed before an event, before it."""

    def function() -> None:
        from nbelastic.elastic.ranks.context import current
        from nbelastic.messages import RankNote

        libc = ctypes.CDLL(None)
        print("python", end=" ")
        sys.stdout.flush()
        libc.printf(b"C ")
        libc.fflush(None)
        subprocess.run(["printf", "child "], check=True)
        os.write(2, b"stderr\n")
        current().port.report(RankNote(0, "warning", "in between"))  # type: ignore[attr-defined]
        print("after")

    rank, _ = host.run(function)
    came = [each for each in rank.came if not isinstance(each, RankTelemetry)]
    events = [n for n, each in enumerate(came) if isinstance(each, RankEvent)]
    assert len(events) == 2
    before = b"".join(each for each in came[: events[0]] if isinstance(each, bytes))
    between = b"".join(each for each in came[events[0] : events[1]] if isinstance(each, bytes))
    assert before.startswith(b"python C child stderr\n")  # what it printed just after may be here
    assert before + between == b"python C child stderr\nafter\n"


def print_much(lines: int) -> None:
    for number in range(lines):
        print(f"{number:099d}")


def test_what_a_rank_prints_at_full_speed_comes_whole(host: Host) -> None:
    rank, _ = host.run(print_much, 100_000)  # 10 MB
    assert rank.output.splitlines() == [f"{number:099d}" for number in range(100_000)]


def test_a_reader_that_pauses_holds_the_rank_up_and_loses_nothing(host: Host) -> None:
    rank = host.launch(print_much, 20_000)
    host.do(until(lambda: len(rank.output) > 0))
    rank.process.pause_output(True)
    host.do(until(lambda: psutil.Process(rank.process.pid).status() != "running"))
    assert not rank.process.ended
    rank.process.pause_output(False)
    host.do(rank.end())
    assert rank.output.splitlines() == [f"{number:099d}" for number in range(20_000)]


def test_what_is_in_the_pipe_when_a_paused_rank_ends_comes_too(host: Host) -> None:
    rank = host.launch(lambda: [print("first"), time.sleep(30)])
    host.do(rank.printed("first"))
    rank.process.pause_output(True)
    rank.process.send_signal(signal.SIGKILL)
    host.do(rank.end())
    rank = host.launch(print_much, 500)  # less than a pipe holds
    rank.process.pause_output(True)
    host.do(rank.end())
    assert len(rank.output.splitlines()) == 500


def test_a_child_that_keeps_the_pipe_does_not_hold_up_the_end(host: Host) -> None:
    def function() -> int:
        words = ["sh", "-c", "while sleep 0.05; do echo child; done"]
        return subprocess.Popen(words, start_new_session=True).pid

    rank, exit_ = host.run(function)
    child = rank.result
    assert exit_.status == 0
    host.do(until(lambda: not is_there(child)))  # it ends as it prints again
    seen = len(rank.came)
    host.do(asyncio.sleep(0.1))
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
            host.do(_call(lambda rank=rank: rank.process.send_signal(signal.SIGTERM, "late")))
        exit_ = host.do(rank.end())
        assert (exit_.reason, rank.output.endswith(ends)) == ("" if go else "late", True)
        assert not is_there(rank.result)
    rank, _ = host.run(function, "/none", True)
    host.do(until(lambda: not is_there(int(rank.output.split()[0]))))


@pytest.mark.slow
@pytest.mark.parametrize("killed_by", ["itself", "its worker", "the end of its server"])
def test_what_a_killed_rank_had_in_shared_memory_is_removed(killed_by: str) -> None:
    def function() -> None:
        from multiprocessing.shared_memory import SharedMemory

        deaf = subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"])
        memory = SharedMemory(create=True, size=1000)
        time.sleep(0.3)
        print(f"name {memory.name} pids {deaf.pid} end", flush=True)
        if killed_by == "itself":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    host = Host()
    rank = host.launch(function)
    host.do(rank.printed("end"))
    if killed_by == "its worker":
        host.do(_call(lambda: rank.process.send_signal(signal.SIGKILL)))
    elif killed_by == "the end of its server":
        os.kill(rank.process.server, signal.SIGKILL)
    host.do(rank.end())
    name = rank.output.partition("name ")[2].partition(" ")[0]
    (deaf,) = pids_in(rank.output)
    host.do(until(lambda: not os.path.exists(f"/dev/shm/{name}") and not is_there(deaf)))
    host.close()


async def _call(function: Callable[[], None]) -> None:
    function()


def test_a_fork_that_keeps_the_channel_does_not_hold_up_the_end(host: Host) -> None:
    def function() -> int:
        pid = os.fork()
        if not pid:
            os.setsid()
            time.sleep(30)
        return pid

    rank, _ = host.run(function)
    os.kill(rank.result, signal.SIGKILL)


# -- the end of the server, and of the worker ------------------------------------------------------


def with_child() -> None:
    child = subprocess.Popen(["sleep", "60"])
    print(f"pids {os.getpid()} {child.pid} end", flush=True)
    time.sleep(60)


def pids_in(text: str) -> list[int]:
    return [int(each) for each in text.partition("pids ")[2].partition(" end")[0].split()]


@pytest.mark.slow
def test_a_server_that_is_killed_takes_its_ranks_with_it_and_is_replaced() -> None:
    host = Host()
    try:
        rank = host.launch(with_child)
        host.do(rank.printed(" end"))
        first = rank.process.server
        assert first is not None
        os.kill(first, signal.SIGKILL)
        exit_ = host.do(rank.end())
        assert str(exit_) == "its rank server has ended (killed by signal 9)"
        host.do(until(lambda: not any(map(is_there, pids_in(rank.output)))))
        rank, _ = host.run(lambda: 5)
        assert rank.result == 5
        assert rank.process.server != first
    finally:
        host.close()


OWNER = """
import os, sys, time
from tests.cluster.test_rank_process import with_child
from tests.support.rank_processes import Host
host = Host()
rank = host.launch(with_child)
host.do(rank.printed(" end"))
print(rank.output.strip().replace("pids", f"pids {rank.process.server}"), flush=True)
host.loop.run_forever()
"""


@pytest.mark.slow
def test_all_end_with_the_process_that_owns_the_server() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout as output:
        pids = pids_in(output.readline())
        assert len(pids) == 3
        assert all(map(is_there, pids))
        owner.kill()
        owner.wait()
    asyncio.run(until(lambda: not any(map(is_there, pids))))


@pytest.mark.slow
def test_all_end_where_the_server_does_not_answer() -> None:
    """A server that is stopped cannot act on the end of its worker. Its ranks do."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout as output:
        server, *ranks = pids_in(output.readline())
        os.kill(server, signal.SIGSTOP)
        try:
            owner.kill()
            owner.wait()
            asyncio.run(until(lambda: not any(map(is_there, ranks))))
        finally:
            os.kill(server, signal.SIGKILL)


@pytest.mark.slow
def test_closing_a_server_ends_what_runs() -> None:
    host = Host()
    rank = host.launch(with_child)
    host.do(rank.printed(" end"))
    host.close_launcher()
    assert str(host.do(rank.end())) == "its worker was closed"
    host.do(until(lambda: not any(map(is_there, pids_in(rank.output)))))
    host.close()


# -- nothing stays ---------------------------------------------------------------------------------


def remains(host: Host) -> tuple[set[str], list[int], list[int], int]:
    """Return descriptors, children, the template's children and files."""
    found = set()
    for each in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{each} {os.readlink(f'/proc/self/fd/{each}')}")
        except OSError:
            continue
    ours = [child.pid for child in psutil.Process().children()]
    theirs = [child.pid for child in psutil.Process(host.launcher.template).children()]
    server = len(os.listdir(f"/proc/{host.launcher.template}/fd"))
    return found, ours, theirs, server


def test_nothing_is_left_of_many_ranks(host: Host) -> None:
    host.run(lambda: None)
    host.do(until(lambda: not remains(host)[2]))  # the server ends after its rank
    before = remains(host)
    ends: list[Any] = [
        lambda: None,
        lambda: os._exit(1),
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        lambda: subprocess.Popen(["sleep", "60"]).pid // 0,
        lambda: [os.fork() or os._exit(0) for _ in range(3)],
    ]
    for _ in range(5):
        ranks = [host.launch(end) for end in ends * 2]
        for rank in ranks:
            host.do(rank.end())
    host.do(until(lambda: remains(host) == before))


# -- spawn -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_where_forking_is_not_safe_a_rank_is_a_new_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_launcher, "METHOD", "spawn")
    host = Host()
    try:
        rank, exit_ = host.run(lambda: (print("printed"), os.getpid())[1])
        assert (rank.result, rank.output, exit_.status) == (rank.process.pid, "printed\n", 0)
        _, exit_ = host.run(crash)
        assert "(SIGSEGV), at" in str(exit_)
        rank = host.launch(with_child)
        host.do(rank.printed(" end"))
        os.kill(rank.process.server or 0, signal.SIGKILL)
        host.do(rank.end())
        host.do(until(lambda: not any(map(is_there, pids_in(rank.output)))))
    finally:
        host.close()
