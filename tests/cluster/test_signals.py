"""Signals in workers' processes: interrupts."""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace

import pytest

from nbelastic.cluster.dask_compat import after_shielding


@pytest.fixture(autouse=True)
def _handlers():
    numbers = (signal.SIGINT, signal.SIGHUP)
    before = {each: signal.getsignal(each) for each in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_nannys_worker_ignores_interrupts_and_no_other_process(monkeypatch):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    shielded = after_shielding(lambda: "asked")
    assert shielded() == "asked"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setitem(sys.modules, "multiprocessing", SimpleNamespace(parent_process=object))
    assert shielded() == "asked"
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGHUP)
