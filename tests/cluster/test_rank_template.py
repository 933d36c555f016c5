"""One template a host: who shares it, what a rank has of its worker, what any death costs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from nbelastic import rank_template
from tests.support.rank_processes import Host, is_there, until

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import the tests

OTHER_USER = 65534


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host.alone("templates") as made:
        made.run(lambda: None)
        yield made


# -- who shares a template -------------------------------------------------------------------------


def named() -> str:
    return rank_template.address(rank_template.search_path())


def test_what_is_fixed_at_import_or_for_good_has_a_template_of_its_own(tmp_path, monkeypatch):
    before = named()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.chdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    mask = os.umask(0o77)
    try:
        assert named() == before
    finally:
        os.umask(mask)
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    seen = {before}
    for change in (
        lambda patch: patch.setenv("MALLOC_ARENA_MAX", "1"),
        lambda patch: patch.syspath_prepend(tmp_path),
        lambda patch: patch.setattr(rank_template, "_stamp", lambda path: "newer"),
        lambda patch: patch.setattr(rank_template, "standing", lambda pid: ["of another user"]),
    ):
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            seen.add(named())
    assert len(seen) == 5
    assert named() == before


def test_workers_of_one_standing_share_one_and_each_rank_has_its_own_workers(host, tmp_path):
    text = in_process(
        tmp_path,
        """
import json, os, resource
os.umask(0o27)
resource.setrlimit(resource.RLIMIT_NOFILE, (333, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.chdir(sys.argv[1])
os.environ["CUDA_VISIBLE_DEVICES"] = "5"
open("/proc/self/oom_score_adj", "w").write("77")

def function():
    import os, resource
    files, oom = resource.getrlimit(resource.RLIMIT_NOFILE)[0], open("/proc/self/oom_score_adj")
    gpus = os.environ["CUDA_VISIBLE_DEVICES"]
    return os.umask(0), files, len(os.sched_getaffinity(0)), os.getcwd(), gpus, int(oom.read())

rank, _ = host.run(function)
print(json.dumps([host.launcher.template, *rank.result]))
""",
    )
    assert json.loads(text) == [host.launcher.template, 0o27, 333, 1, str(tmp_path), "5", 77]


def in_process(tmp_path: Path, code: str, *before: str) -> str:
    """Run code beside a host in a new process; return what it prints."""
    head = "import sys\nfrom tests.support.rank_processes import Host\nhost = Host()\n"
    words = [*before, sys.executable, "-c", f"{head}{code}\nhost.close()\n", str(tmp_path)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    done = subprocess.run(words, capture_output=True, text=True, env=variables, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


def test_two_that_start_one_at_once_end_with_one():
    with Host.alone("two") as first, Host.alone() as second:
        assert first.run(os.getpid)[1].status == second.run(os.getpid)[1].status == 0
        assert first.launcher.template == second.launcher.template
        os.kill(first.launcher.template, signal.SIGKILL)


def test_a_template_ends_some_time_after_its_last_worker_and_leaves_nothing():
    """With a time that is zero; its worker's line alone keeps it."""
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = f"nbelastic-test-{os.getpid()}"
    code = "import sys; from nbelastic import rank_template as t; t.IDLE_S = 0; "
    code += "t.main(*sys.argv[1:])"
    words = [sys.executable, "-c", code, str(theirs.fileno()), name, "bare"]
    with line:
        with theirs:
            subprocess.run(words, pass_fds=[theirs.fileno()], check=True)
        pid = json.loads(line.recv(100))["pid"]
        assert json.loads(line.recv(100))["op"] == "ready"
        assert is_there(pid)
    asyncio.run(until(lambda: not is_there(pid)))

    def refused() -> bool:  # the system may close the socket just after the process
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            return probe.connect_ex(f"\0{name}") == errno.ECONNREFUSED

    asyncio.run(until(refused))


# -- other users -----------------------------------------------------------------------------------


def forked(call: Any, user: int = 0) -> multiprocessing.Process:
    """Call a function in a fork, as another user if one is given."""

    def run() -> None:
        if user:
            os.setgid(user)
            os.setuid(user)
        call()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@needs_root
def test_another_user_cannot_speak_to_it(host):
    name = f"\0{host.launcher._name}"

    def ask() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.connect(name)
            os._exit(0 if line.recv(100) == b"" else 1)

    process = forked(ask, OTHER_USER)
    process.join(60)
    assert process.exitcode == 0
    assert host.run(lambda: 5)[0].result == 5


@pytest.mark.parametrize(
    ("user", "listens", "words"),
    [
        pytest.param(OTHER_USER, True, "has other rights than this one", marks=needs_root),
        (0, False, "or its address is bound"),
    ],
)
def test_one_of_another_user_or_that_does_not_listen_is_left(
    monkeypatch, caplog, user, listens, words
):
    name = f"taken-{os.getpid()}-{user}-{listens}"
    monkeypatch.setattr(rank_template, "address", lambda path: name)
    ours, theirs = multiprocessing.Pipe()

    def squat() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{name}")
            if listens:
                listener.listen()
            theirs.send("bound")
            time.sleep(600)

    process = forked(squat, user)
    assert ours.recv() == "bound"
    with Host.alone() as made:
        assert made.run(lambda: 5)[0].result == 5
    assert f"{words}. This worker starts one for itself" in caplog.text
    process.kill()
    process.join()


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no setpriv")
def test_a_second_user_has_a_template_and_hears_what_the_system_refuses(host, tmp_path):
    """Neither the template nor a server may fork: there are as many processes as are allowed."""
    tmp_path.chmod(0o755)
    capability = "+dac_read_search"  # the tests' environment may be root's alone
    user = ["setpriv", f"--reuid={OTHER_USER}", f"--inh-caps={capability}"]
    text = in_process(
        tmp_path,
        """
import json, os, resource
def function():
    import os
    return os.getuid()
uid = host.run(function)[0].result
most, hard = resource.RLIMIT_NPROC, resource.getrlimit(resource.RLIMIT_NPROC)[1]
resource.setrlimit(most, (0, hard))
server = str(host.run(function)[1])
resource.prlimit(host.launcher.template, most, (0, hard))
template = str(host.run(function)[1])
resource.prlimit(host.launcher.template, most, (hard, hard))
resource.setrlimit(most, (hard, hard))
print(json.dumps([uid, host.launcher.template, server, template, host.run(function)[0].result]))
""",
        *(*user, f"--ambient-caps={capability}"),
    )
    uid, template, of_server, of_template, after = json.loads(text)
    assert (uid, after) == (OTHER_USER, OTHER_USER)
    assert template != host.launcher.template
    for reason in (of_server, of_template):
        assert reason.startswith("the system refused to start its process: ")


# -- a template that dies, or does not answer ------------------------------------------------------


def test_the_death_of_the_template_costs_no_rank_nor_does_that_of_another(host, tmp_path):
    def function() -> int:
        print("pids", daemon(), "end")
        while not (tmp_path / "go").exists():
            time.sleep(0.01)
        return 7

    first = host.launcher.template
    rank = host.launch(function)
    host.do(rank.printed("end"))
    host.run(lambda: os.kill(os.getpid(), signal.SIGKILL))
    host.do(until(lambda: len(psutil.Process(first).children()) == 1))
    assert is_there(*rank.pids), "another rank of the worker has started it"
    os.kill(first, signal.SIGKILL)
    host.do(until(lambda: host.launcher.template not in (0, first)))
    (tmp_path / "go").touch()
    host.do(rank.end())
    assert rank.result == 7
    host.do(until(lambda: not is_there(*rank.pids)))
    assert host.run(lambda: 5)[0].result == 5


def test_one_that_has_ended_counts_as_none_though_it_is_still_bound():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        if not (pid := os.fork()):
            listener.listen()  # in the name of this process
            signal.pause()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            while line.connect_ex(listener.getsockname()):
                pass
            assert rank_template.peer(line) == pid
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            with pytest.raises(ConnectionRefusedError, match=f"process {pid} has ended"):
                rank_template.peer(line)


def test_a_rank_that_is_to_end_before_its_template_is_ready_ends_at_once():
    with Host.alone("early") as made:
        rank = made.launch(lambda: None)
        assert rank.process.waits
        rank.process.send_signal(signal.SIGTERM, "it is to end")
        assert str(made.do(rank.end())) == "it is to end"
        made.do(until(lambda: made.launcher._starter is None))
        os.kill(made.launcher.template, signal.SIGKILL)


# -- what a rank leaves ----------------------------------------------------------------------------


def daemon() -> int:
    """Fork twice, into a session of its own; return the process."""
    source, target = os.pipe()
    if not os.fork():
        os.setsid()
        if pid := os.fork():
            os.write(target, str(pid).encode())
            os._exit(0)
        os.close(source)
        os.close(target)
        time.sleep(300)
    os.close(target)
    os.wait()
    with os.fdopen(source) as file:
        return int(file.read())


def by_shell(line: str) -> int:
    words = ["bash", "-c", f"{line} & echo $!"]
    return int(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)


KINDS = {
    "a session of its own": lambda: subprocess.Popen(["sleep", "300"], start_new_session=True).pid,
    "job control": lambda: by_shell("set -m; sleep 300 >/dev/null"),
    "a daemon": daemon,
    "deaf": lambda: by_shell("setsid sh -c 'trap \"\" TERM; sleep 300; sleep 300' >/dev/null"),
}


@pytest.mark.parametrize("by", ["itself", "a signal of its own", "its worker", "its server"])
def test_what_a_rank_has_started_ends_with_it_wherever_it_has_gone(host, by):
    """However it ends; what it had in shared memory is removed, too."""

    def function() -> None:
        from multiprocessing.shared_memory import SharedMemory

        memory = SharedMemory(create=True, size=1000)
        pids = [kind() for kind in KINDS.values()]
        pids += [each.pid for pid in pids for each in psutil.Process(pid).children()]
        time.sleep(0.3)
        print("memory", memory.name, "pids", *pids, "end", flush=True)
        if by == "a signal of its own":
            os.kill(os.getpid(), signal.SIGKILL)
        if by != "itself":
            time.sleep(60)
        os._exit(0)  # a function that returns waits for what is in its process group

    rank = host.launch(function)
    host.do(rank.printed("end"))
    if by == "its worker":
        rank.process.send_signal(signal.SIGKILL)
    elif by == "its server":
        os.kill(rank.process.server, signal.SIGKILL)
    exit_ = host.do(rank.end())
    assert by != "its server" or str(exit_) == "its rank server has ended"
    assert len(rank.pids) >= len(KINDS)
    memory = Path("/dev/shm", rank.output.split()[1])
    host.do(until(lambda: not memory.exists() and not any(map(is_there, rank.pids))))


# -- any death, at any moment ----------------------------------------------------------------------


def own(line: Any) -> None:
    """Be a worker with a rank that has started others; tell their processes."""
    made = Host()
    rank = made.launch(lambda: [print("pids", os.getpid(), daemon(), "end"), time.sleep(300)])
    made.do(until(lambda: made.launcher.template > 0))
    line.send(made.launcher.template)
    made.do(rank.printed("end"))
    line.send([rank.process.server, *rank.pids])
    made.loop.run_forever()


@pytest.mark.parametrize(
    ("number", "seed"), [(12, 5), pytest.param(100, None, marks=pytest.mark.nightly)]
)
def test_nothing_is_left_however_workers_servers_and_ranks_end(host, number, seed):
    dice = random.Random(seed)
    fork = multiprocessing.get_context("fork")
    for turn in range(number):
        ours, theirs = fork.Pipe()
        worker = fork.Process(target=own, args=(theirs,))
        worker.start()
        template = ours.recv()
        pids: list[int] = []
        if turn == 0:  # a server that is stopped cannot act on the end of its worker
            pids = ours.recv()
            os.kill(pids[0], signal.SIGSTOP)
        elif dice.random() < 0.3:  # while it asks, or the rank begins
            time.sleep(dice.uniform(0, 0.1))
        else:
            pids = ours.recv()
            chosen = dice.sample([worker.pid, *pids[:2]], dice.choice([1, 1, 2]))
            if dice.random() < 0.1 and pids[0] not in chosen:
                chosen.append(template)  # with a server, what its rank has started is lost sight of
            for pid in dice.sample(chosen, len(chosen)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        worker.kill()
        worker.join()
        host.do(until(lambda pids=pids: not any(map(is_there, pids))))
    host.run(lambda: None)
    name = f"of {os.getpid()}"
    host.do(until(lambda: not psutil.Process(host.launcher.template).children(recursive=True)))
    names = [each.info["name"] or "" for each in psutil.process_iter(["name"])]
    assert not [each for each in names if each.endswith(name)]
    assert len(os.listdir(f"/proc/{host.launcher.template}/fd")) < 12
