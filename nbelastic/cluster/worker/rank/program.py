"""Run the training function of a job as one of its ranks.

It runs in the main thread; orders come in another one (:meth:`RankProgram.take`). The simulation
runs it, too.
"""

from __future__ import annotations

import bdb
import contextlib
import contextvars
import logging
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

from nbelastic import messages as m
from nbelastic.cluster.payload import install, take_settings
from nbelastic.cluster.pulled import Pulled, Returned, pack_variables, trained_models
from nbelastic.cluster.rank_error import pack_error
from nbelastic.elastic.ranks.context import activate
from nbelastic.elastic.ranks.runtime import DEFAULT_RUNTIME, RankRuntime, RankSpec
from nbelastic.elastic.ranks.session import Session
from nbelastic.elastic.ranks.timeline import timeline
from nbelastic.elastic.training_checks import TrainingChecks
from nbelastic.errors import (
    CollectiveError,
    RankExit,
    RanksDisagree,
    StateMismatch,
    Stopped,
    summary_of,
)
from nbelastic.pickling import dumps

from .fault_injector import FaultInjector

logger = logging.getLogger(__name__)

NO_INPUT = "EOFError: EOF when reading a line"
NO_CONSOLE = (
    "breakpoint(), pdb and input() need a console, and a rank has none. To debug the function, "
    "call it in the notebook without fit: outside a job it runs there, as a world of one rank"
)
GROUP_ADVICE = (
    'Call torch.distributed.init_process_group("nbelastic") first: in a rank it needs neither '
    "address nor rank nor size. Or use nbelastic.torch (DistributedOptimizer, allreduce), which "
    "needs no process group."
)

_NO_GROUP = "process group has not been initialized"


class RankProgram:
    """One start of the function; `send` sends the worker a message, after all of its output."""

    def __init__(
        self,
        spec: RankSpec,
        payload: m.JobPayload,
        send: Callable[[m.Message], None],
        runtime: RankRuntime = DEFAULT_RUNTIME,
    ) -> None:
        self._spec = spec
        self._payload = payload
        self._send = send
        self._over = False
        self._called: Callable[..., Any] | None = None
        self.returned = False  # the function has
        self._process = os.getpid()
        self.session = Session(spec, self.report, runtime)
        self.session.secret = payload.secret

    # -- messages ----------------------------------------------------------------------------------

    def report(
        self, event: m.Event, result: bytes | None = None, error: m.PackedError | None = None
    ) -> None:
        """Send an event to the driver, after what the rank has printed and reported before."""
        self._send_telemetry()
        self._send(m.RankEvent(self._spec.job, event, result, error))

    def _send_telemetry(self) -> None:
        try:
            taken = self.session.telemetry.take(self._spec.job, self._spec.start)
        except Exception:  # figures are no reason to keep others waiting
            logger.exception("the telemetry of start %d cannot be read", self._spec.start)
        else:
            self._send(taken)

    def beat(self) -> None:
        """Send a heartbeat and telemetry, and try again to end if the rank is to. Any thread."""
        self.session.nudge()
        self._send(m.Heartbeats(((self._spec.job, self.session.beat()),)))
        self._send_telemetry()

    def take(self, order: m.Message) -> None:
        """Take an order. Any thread but the rank's."""
        try:
            if not isinstance(order, m.RankOrder):
                raise TypeError(f"a rank does not expect {type(order).__name__}")
            self._obey(order.effect)
        except Exception as error:
            logger.exception("an order to start %d cannot be obeyed", self._spec.start)
            self.fail(error)

    def _obey(self, effect: m.RankEffect) -> None:
        if isinstance(effect, m.InjectFaults):
            self._injector().take(effect.faults, effect.drop)
        elif isinstance(effect, m.Publish):
            self.session.on_plan(effect.plan)
            if self.session.telemetry.observer is not None:
                self.session.telemetry.observer.plan()
        elif isinstance(effect, m.Abort):
            self.session.on_abort(effect.generation, str(effect.reason))
        elif isinstance(effect, m.Notify):
            self.session.on_notice(effect.generation)
        elif isinstance(effect, m.Release):
            self.session.on_release(effect.generation)
        elif isinstance(effect, m.EndRank):
            self.session.on_end(effect.how, str(effect.reason), effect.save)

    def _injector(self) -> FaultInjector:
        """Return the rank's fault injector; make it with the first order."""
        observer = self.session.telemetry.observer
        if not isinstance(observer, FaultInjector):
            observer = FaultInjector(self._spec.job, self.session, self._send)
            self.session.telemetry.observer = observer
        return observer

    # -- the function ------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the function, and report its outcome or its failure to start."""
        try:
            with activate(self.session):
                self._run()
        except BaseException as error:  # nothing of the function's: all of that is reported there
            with contextlib.suppress(BaseException):  # it shows the error before, of any class
                text = "start %d of job %r cannot be run"
                logger.exception(text, self._spec.start, self._spec.job)
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Report an error of nbelastic's own, or of the process."""
        start = self._spec.start
        try:
            packed = pack_error(error)
            self._finish(m.RankRaised(start, packed.summary), error=packed)
        except BaseException as another:  # it may be the packing or the sending that fails
            self._finish(m.RankRaised(start, summary_of(another)))

    def _finish(
        self, event: m.Event, result: bytes | None = None, error: m.PackedError | None = None
    ) -> None:
        """Send the last event of this rank; later events are dropped."""
        if not self._over:
            self.report(event, result, error)
            self._over = True

    def _run(self) -> None:
        start, session = self._spec.start, self.session
        try:
            install(pickle.loads(self._payload.modules))
            take_settings(self._payload.torch)
            self._begin_timeline()
            try:
                with session.user_code():
                    result = self._function()
                session.complete_groups()
            finally:
                timeline.close_part()  # before the event with which the job may end
        except RankExit as error:
            # Where the job goes on, another rank becomes rank 0.
            pulled = self._packed() if isinstance(error, Stopped) else None
            self._finish(m.RankLeft(start), dumps(Returned(None, pulled)) if pulled else None)
        except BaseException as error:  # the user's, whatever it is: it goes to the kernel
            self._report_error(error)
        else:
            session.kept(TrainingChecks).returned()
            self.returned = True
            isolated = not (session.generation or session.in_torch_group)
            self._finish(m.RankReturned(start, isolated=isolated), result=result)
        finally:
            session.close()

    def _begin_timeline(self) -> None:
        part = self._spec.timeline
        if part is None:
            return
        try:
            cycles = os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "").lower() in ("1", "true")
            timeline.record(part, self.session.rank, marks_cycles=cycles)
        except OSError as error:
            self.session.warn(f"a rank is not in the timeline: it cannot write its part\n{error}")

    def _function(self) -> bytes:
        """Unpickle and call the user's function; return its pickled result."""
        function, args, kwargs = cloudpickle.loads(self._payload.call)
        self._called = function
        try:
            value = contextvars.copy_context().run(function, *args, **kwargs)
        except BaseException as error:
            self._end_fork(error)
            raise
        self._end_fork(None)
        refused = f"what the function returned (a {type(value).__name__}) cannot be sent"
        try:
            pulled = self._packed()
            first = self.session.rank == 0
            trained = trained_models(getattr(function, "captured", {})) if first else ()
            result = dumps(Returned(value, pulled, trained) if pulled or trained else value)
        except Exception as error:  # pickling runs code of any class
            raise TypeError(f"{refused}: {summary_of(error)}") from error
        if len(result) > m.MOST_BYTES:
            raise ValueError(
                f"{refused}: it takes {len(result) / 1e9:,.1f} GB, and a message carries at most "
                f"{m.MOST_BYTES / 1e9:,.1f} GB; write it to a file, and return the file's name"
            )
        return result

    def _packed(self) -> dict[str, Pulled]:
        """Return the variables of rank 0 that go back to the kernel."""
        if self.session.rank != 0 or self._called is None:
            return {}
        return pack_variables(self._called, self._spec.pull, m.MOST_BYTES // 2)

    def _end_fork(self, error: BaseException | None) -> None:
        """End a fork of the rank that returns from the function, as at the end of a script."""
        if os.getpid() == self._process:
            return
        code = int(error is not None)
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if error.code not in (None, code):
                sys.stderr.write(f"{error.code}\n")
        elif error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        os._exit(code)

    def _report_error(self, error: BaseException) -> None:
        kind = type(error)  # isinstance() would ask the error for its class, too
        if issubclass(kind, bdb.BdbQuit) or summary_of(error) == NO_INPUT:
            error.args = (NO_CONSOLE,)
        advise(error)
        packed = pack_error(error)
        everywhere = issubclass(kind, RanksDisagree)
        event = m.RankRaised(
            self._spec.start,
            packed.summary,
            collective=issubclass(kind, CollectiveError) and not everywhere,
            version=self.session.version,
            on_all_ranks=everywhere,
            state_mismatch=issubclass(kind, StateMismatch),
        )
        self._finish(event, error=packed)


def advise(error: BaseException) -> None:
    """Add advice to an error about a missing process group or a missing Horovod."""
    if issubclass(type(error), ModuleNotFoundError) and "'horovod" in summary_of(error):
        advice = "Horovod's functions are in nbelastic: import nbelastic.torch as hvd"
    elif issubclass(type(error), (ValueError, RuntimeError)) and _NO_GROUP in summary_of(error):
        advice = GROUP_ADVICE
    else:
        return
    if hasattr(error, "add_note"):
        error.add_note(advice)
    elif len(error.args) == 1:  # Python 3.10
        error.args = (f"{error.args[0]}\n{advice}",)
