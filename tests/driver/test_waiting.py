"""Interrupts of a wait, whenever they come."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from nbelastic.driver import display
from nbelastic.driver.fit import wait_interruptibly
from nbelastic.driver.job import Job
from nbelastic.errors import JobInterrupted


class Waited(Job):
    """A job whose parts raise a `KeyboardInterrupt` when it is their turn."""

    def __init__(self, *interrupted: str) -> None:
        self._driver = SimpleNamespace(name="a", owns_cluster=True, free_workers=None)
        self._interrupted = list(interrupted)
        self.calls: list[str] = []

    status = SimpleNamespace(ranks=())

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self._interrupted and self._interrupted[0] == call:
            del self._interrupted[0]
            raise KeyboardInterrupt

    def wait(self, timeout=None) -> bool:
        self._note("wait")
        return self.calls.count("wait") > 5

    def stop(self) -> None:
        self._note("stop")

    def cancel(self) -> None:
        self._note("cancel")

    def tick(self) -> None:
        self._note("tick")

    def say(self, text: str) -> None:
        self._note("say")


@pytest.mark.parametrize(
    ("interrupted", "asked"),
    [
        (("wait",), ["stop"]),
        (("tick", "wait"), ["stop", "cancel"]),
        (("wait", "stop"), ["stop", "cancel"]),
        (("wait", "say"), ["stop", "cancel"]),
        (("wait", "wait", "cancel"), ["stop", "cancel", "cancel"]),
    ],
)
def test_no_interrupt_leaves_a_job_to_itself(monkeypatch, interrupted, asked):
    monkeypatch.setattr(display, "watching", contextlib.nullcontext)
    job = Waited(*interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        wait_interruptibly(job)
    assert raised.type is JobInterrupted, job.calls
    assert [call for call in job.calls if call in ("stop", "cancel")] == asked
