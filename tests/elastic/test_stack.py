"""Looking where another thread stands: it does no harm, whatever runs meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from nbelastic.elastic.ranks.stack import innermost, user_line

SCRIPT = """
import gc, random, sys, threading, time
from nbelastic.elastic.ranks import stack

looking = threading.get_ident()

def let_others_run(phase, info):
    if threading.get_ident() == looking and watching:
        time.sleep(0.001)

calls = []  # of many sizes, so that a call's memory soon holds something else
for size in range(1, 40):
    names = {"calls": calls, "random": random}
    lines = [f"def call{size}(depth):", *(f"    v{i} = {{}}" for i in range(size))]
    lines.append("    return random.choice(calls)(depth - 1) if depth else None")
    exec("\\n".join(lines), names)
    calls.append(names[f"call{size}"])

def work():
    while not over:
        random.choice(calls)(random.randrange(40))

over = watching = False
gc.callbacks.append(let_others_run)
gc.set_threshold(5)
sys.setswitchinterval(1e-4)
worker = threading.Thread(target=work, daemon=True)
worker.start()
stack.NOT_THE_USERS = ("",)  # nothing is found: every call is looked at
end = time.monotonic() + 2
while time.monotonic() < end:
    watching = True
    assert not stack.user_line(worker.ident)
    watching = False
over = True
worker.join()
print("looked", gc.isenabled())
"""


def test_a_thread_that_is_looked_at_may_go_on_meanwhile():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "looked True\n"), done.stderr


def test_who_has_no_search_for_garbage_gets_none():
    gc.disable()
    try:
        user_line(threading.get_ident())
        assert not gc.isenabled()
        with pytest.raises(ZeroDivisionError):
            innermost(threading.get_ident(), lambda code: 1 // 0)
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ZeroDivisionError):
        innermost(threading.get_ident(), lambda code: 1 // 0)
    assert gc.isenabled()


def test_there_is_nothing_to_see_of_a_thread_that_has_ended():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert user_line(thread.ident) == []
