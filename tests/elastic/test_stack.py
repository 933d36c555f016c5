"""Calls that break if another thread goes on in them: the garbage collector is off meanwhile."""

import gc
import subprocess
import sys
import threading

import pytest

from nbelastic.elastic.ranks.stack import innermost


@pytest.mark.parametrize("searches", [True, False])
def test_no_garbage_is_searched_for_while_frames_are_looked_up(searches):
    seen = []

    def wanted(code):
        seen.append(gc.isenabled())
        return 1 // (len(seen) < 2)

    (gc.enable if searches else gc.disable)()
    try:
        innermost(threading.get_ident(), wanted)
        assert gc.isenabled() is searches
        with pytest.raises(ZeroDivisionError):
            innermost(threading.get_ident(), wanted)
        assert (seen, gc.isenabled()) == ([False] * 2, searches)
    finally:
        gc.enable()


STATES = """
import gc, threading, torch
from nbelastic.elastic.followed import generator_states
gc.set_threshold(20, 2, 2)
def take():
    for _ in range(5_000):
        garbage = [torch.ones(1)]
        garbage.append(garbage)
        generator_states()
threads = [threading.Thread(target=take) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.slow
def test_threads_take_the_states_of_generators_while_tensors_are_collected():
    subprocess.run([sys.executable, "-c", STATES], check=True, timeout=60)  # a deadlock of torch's
