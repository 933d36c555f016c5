"""SIGINT for the kernel's process group, which a notebook's Interrupt sends, spares its workers.

A script is the kernel of a process group of its own. Its workers start as Dask starts them.
"""

import os
import subprocess
import sys

SCRIPT = """
import faulthandler, os, signal, sys, threading, time, traceback
from pathlib import Path
from distributed import Client, LocalCluster
import nbelastic
from nbelastic.driver import wait_interruptibly
from nbelastic.cluster import JobClient
from tests.support.clusters import until
from tests.support.training import Workload

def interrupted(call, when=None):
    def waits():  # the main thread is in the call, not still in the start of this one
        frame = sys._current_frames()[threading.main_thread().ident]
        called = [outer.f_code for outer, _ in traceback.walk_stack(frame)]
        return call.__code__ in called and when()

    def interrupt():
        until(waits, "the time for an interrupt")
        time.sleep(0.1)
        os.killpg(os.getpgrp(), signal.SIGINT)

    try:
        if when is not None:
            threading.Thread(target=interrupt).start()
        call()
    except KeyboardInterrupt as error:
        print(type(error).__name__, str(error).partition("; ")[2])

faulthandler.dump_traceback_later(120, exit=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
marks = Path(sys.argv[1])

def main():
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, \\
            Client(cluster) as client:
        before = sorted(client.run(os.getpid).values())
        opened = JobClient.open

        def interrupted_before(*args):  # no worker has an agent yet
            JobClient.open = opened
            os.killpg(os.getpgrp(), signal.SIGINT)
            time.sleep(60)

        JobClient.open = interrupted_before
        interrupted(lambda: nbelastic.fit(Workload(marks, epochs=1000), cluster=client, np=2))
        ignored = client.run(lambda: signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
        print("while it is opened:", list(ignored.values()))
        job = nbelastic.fit(Workload(marks, epochs=1000), cluster=client, np=2, block=False)
        other_cell = threading.Event()
        interrupted(lambda: other_cell.wait(), lambda: job.status.commits > 3)
        seen = job.status.commits
        until(lambda: job.status.commits > seen + 10 or job.done(), "it trains on")
        print(job.status.state, {event.kind for event in job.history} & {"left", "lost", "leaving"})
        interrupted(lambda: wait_interruptibly(job), lambda: job.status.commits > seen + 30)
        print("same workers:", sorted(client.run(os.getpid).values()) == before)
        print("again:", nbelastic.fit(nbelastic.size, cluster=client, np=2).results())
        print("handler kept:", signal.getsignal(signal.SIGINT) is signal.default_int_handler)

if __name__ == "__main__":
    main()
"""


def test_N12_an_interrupt_frees_the_workers_of_the_kernels_cluster_and_ends_none(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, path, tmp_path],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        start_new_session=True,
    )
    assert done.stdout.splitlines() == [
        "KeyboardInterrupt ",
        "while it is opened: [True, True]",
        "KeyboardInterrupt ",
        "running set()",
        "JobInterrupted it has ended",
        "same workers: True",
        "again: [2, 2]",
        "handler kept: True",
    ], done.stderr
