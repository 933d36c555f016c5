"""Modules that another thread is importing: a rank waits for them."""

from __future__ import annotations

import sys
import threading

import pytest
from nbelastic.cluster.worker.modules import imported


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """Import a module in a thread that stops in its middle until an event."""
    started, go = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "of_slow_module", (started, go), raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "slow_module.py").write_text(
        "import sys\n"
        "started, go = sys.of_slow_module\n"
        "started.set()\n"
        "go.wait(30)\n"
        "import slow_rest\n"
        "whole = True\n"
    )

    def importing():
        try:
            __import__("slow_module")
        except ImportError:
            return

    thread = threading.Thread(target=importing)
    thread.start()
    assert started.wait(30)
    yield tmp_path, go
    go.set()
    thread.join()
    for name in ("slow_module", "slow_rest"):
        sys.modules.pop(name, None)


def ask(go):
    """Ask for the module while it is being imported; return what comes."""
    found = []
    thread = threading.Thread(target=lambda: found.append(imported("slow_module")))
    thread.start()
    thread.join(0.2)
    assert not found and "slow_module" in sys.modules
    go.set()
    thread.join()
    return found[0]


def test_what_another_thread_imports_is_waited_for(slow):
    place, go = slow
    (place / "slow_rest.py").touch()
    assert ask(go).whole


def test_what_another_thread_cannot_import_is_not_there(slow):
    _, go = slow
    assert ask(go) is None


def test_what_nobody_imports_is_not_imported():
    assert imported("turtledemo") is None
    assert "turtledemo" not in sys.modules
