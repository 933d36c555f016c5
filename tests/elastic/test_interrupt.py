"""Where an order to end reaches a rank's thread, and where it must not."""

from __future__ import annotations

import importlib
import queue
import sys
import threading

from nbelastic.elastic.interrupt import Interrupt

from nbelastic.elastic import interrupt as room


class Told(BaseException):
    """What the tests raise."""


class Victim:
    """A thread that runs `function(here, go)`, is reachable meanwhile, and keeps what came out.

    `here` is set by the function where it is to be interrupted; it goes on with `go`.
    """

    def __init__(self, function):
        self.here, self.go = threading.Event(), threading.Event()
        self.outcome = queue.SimpleQueue()
        ready = queue.SimpleQueue()

        def run():
            interrupt = Interrupt()
            ready.put(interrupt)
            try:
                with interrupt.reachable():
                    self.outcome.put(function(self.here, self.go))
            except Told:
                self.outcome.put("told")
            except Exception as error:
                self.outcome.put(error)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        self.interrupt = ready.get(timeout=10)

    def end(self):
        self.go.set()
        outcome = self.outcome.get(timeout=10)
        self.thread.join(10)
        return outcome


def forever():
    while True:
        threading.Event().wait(0.001)


def test_user_code_is_interrupted_wherever_it_is_in_python():
    victim = Victim(lambda here, go: (here.set(), forever()))
    victim.here.wait(10)
    victim.interrupt.request(Told)
    assert victim.end() == "told"


def test_nobody_is_interrupted_without_a_request():
    victim = Victim(lambda here, go: (here.set(), go.wait(10))[1])
    victim.here.wait(10)
    victim.interrupt.nudge()
    assert victim.end() is True


def test_a_request_that_is_dropped_in_time_is_not_raised(monkeypatch):
    victim = Victim(lambda here, go: (here.set(), go.wait(10))[1])
    victim.here.wait(10)
    with monkeypatch.context() as patch:
        patch.setattr(room, "_OURS", (__file__,))  # it is not to be interrupted now
        victim.interrupt.request(Told)
    victim.interrupt.drop()
    victim.interrupt.nudge()
    assert victim.end() is True


def test_not_while_a_thread_is_being_started(monkeypatch):
    """The new thread goes under the identifier of its starter: it would get the exception."""
    true = threading._start_new_thread
    begun = []
    gate = threading.Event()
    victim = Victim(lambda here, go: (gate.wait(10), start()))

    def slow(*args):
        if threading.get_ident() == victim.thread.ident:
            victim.here.set()
            victim.go.wait(10)
            begun.append(true(*args))
            return begun[-1]
        return true(*args)

    def start():
        thread = threading.Thread(target=str)
        thread.start()
        thread.join()
        forever()

    monkeypatch.setattr(threading, "_start_new_thread", slow)
    gate.set()
    assert victim.here.wait(10)
    victim.interrupt.request(Told)
    assert victim.outcome.empty()
    victim.go.set()
    while victim.outcome.empty():
        victim.interrupt.nudge()
    assert victim.end() == "told"
    assert len(begun) == 1


def test_not_during_an_import(monkeypatch, tmp_path):
    (tmp_path / "slow_to_import.py").write_text("import sys\nsys.halfway()\nwhole = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    halfway, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "halfway", lambda: (halfway.set(), go_on.wait(10)), raising=False)
    victim = Victim(lambda here, go: importlib.import_module("slow_to_import").whole and forever())
    assert halfway.wait(10)
    victim.interrupt.request(Told)
    go_on.set()
    while victim.outcome.empty():
        victim.interrupt.nudge()
    assert victim.end() == "told"
    assert sys.modules.pop("slow_to_import").whole


def test_not_in_our_own_rooms_which_obey_by_themselves(monkeypatch):
    monkeypatch.setattr(room, "_OURS", (__file__,))
    victim = Victim(lambda here, go: (here.set(), go.wait(10))[1])
    victim.here.wait(10)
    victim.interrupt.request(Told)
    assert victim.end() is True


def test_not_after_the_block():
    left, checked = threading.Event(), threading.Event()
    outcome = queue.SimpleQueue()
    made = queue.SimpleQueue()

    def run():
        interrupt = Interrupt()
        made.put(interrupt)
        try:
            with interrupt.reachable():
                pass
            left.set()
            checked.wait(10)
            outcome.put("whole")
        except Told:
            outcome.put("told")

    threading.Thread(target=run, daemon=True).start()
    interrupt = made.get(timeout=10)
    left.wait(10)
    interrupt.request(Told)
    checked.set()
    assert outcome.get(timeout=10) == "whole"
