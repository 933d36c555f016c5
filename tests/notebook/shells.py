"""Runs cells in a shell of the test's process, with a ``fit`` that runs the function right here."""

from __future__ import annotations

import cloudpickle

from tests.notebook.fakes import FakeJob


def run(shell, source, *, fails=False):
    """Run a cell; return its result, or with `fails` what it raised."""
    result = shell.run_cell(source, store_history=True)
    if not fails:
        result.raise_error()
        return result
    return result.error_before_exec or result.error_in_exec


class RunJob(FakeJob):
    """A job whose function runs when somebody waits for it."""

    def __init__(self, fit, function, name, started):
        super().__init__(name=name)
        self.started = started
        self.waited = False
        self._fit = fit
        self._function = cloudpickle.dumps(function)

    def wait_interruptibly(self):
        self.waited = True
        self._fit.while_waiting()

    def result(self, timeout=None):
        if self._fit.error is not None:
            raise self._fit.error
        return cloudpickle.loads(self._function)()


class FakeFit:
    """Stands in for ``nbelastic.fit``."""

    def __init__(self):
        self.calls = 0
        self.error = None
        self.refuses = None
        self.while_waiting = lambda: None

    def __call__(self, function, **options):
        if self.refuses is not None:
            raise self.refuses
        self.calls += 1
        self.function, self.options = function, options
        self.job = RunJob(self, function, options["name"], float(self.calls))
        return self.job
