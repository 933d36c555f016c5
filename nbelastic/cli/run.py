"""Run a script as a job: ``dask elastic run``.

Runs in the main thread of the command. It opens the cluster, sends the script, waits with a view,
and gives an exit code: 0 when all ranks have returned, 1 when the job failed, 3 when it has
survived errors, 130 when it was interrupted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from nbelastic.driver import Job, fit, set_display
from nbelastic.driver.options import TABLE, Options, check_name
from nbelastic.errors import JobInterrupted, JobStopped, NbelasticError, OptionError

from . import clusters
from .display import CommandDisplay, ViewOptions, write_errors
from .hosts.discovery import parse_hosts
from .hosts.worker import is_local
from .script.bundle import ScriptCall, bundle_of, mark_of, script_call
from .script.rank import run_script

FAILED = 1
WITH_ERRORS = 3
INTERRUPTED = 130


def run(options: dict[str, Any]) -> int:
    """Run a script as a job; return the exit code."""
    given = _of_job(options)
    Options.given(given)
    check_name(options["name"])
    call, words = _call(options)
    display = CommandDisplay(view_options(options))
    set_display(display)
    if words:
        display.tell(words)
    _set_logging(options["log_level"], verbose=options["verbose"])

    def start() -> Job:
        with clusters.opened(options, display.tell) as cluster:
            return fit(run_script, args=[call], cluster=cluster, name=options["name"], **given)

    with _ended_by_signals():
        try:
            return exit_code(start, display)
        except KeyboardInterrupt:  # the system and a shell may both say that a terminal has gone
            return INTERRUPTED


def exit_code(start: Callable[[], Job], display: CommandDisplay) -> int:
    """Call a function that waits for a job; return the exit code of the command."""
    try:
        errors = start().status.errors
    except OptionError:
        raise
    except JobInterrupted as error:
        display.say(str(error))
        return INTERRUPTED
    except KeyboardInterrupt:
        display.say("interrupted before the job began; what was started for it is closed")
        return INTERRUPTED
    except NbelasticError as error:
        kind = "" if isinstance(error, JobStopped) else f"{type(error).__name__}: "
        display.say(f"{kind}{error}")
        return FAILED
    finally:
        display.flush()
    return FAILED if write_errors else WITH_ERRORS if errors else 0


def view_options(options: Mapping[str, Any]) -> ViewOptions:
    """Return how to show a job, by the options and what stderr is."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    can_draw = is_terminal and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    for style in ("json", "quiet", "plain"):
        if options.get(style):
            break
    else:
        style = "live" if can_draw and importlib.util.find_spec("rich") is not None else "plain"
    return ViewOptions(style, bool(options.get("prefix_output")), options.get("output_filename"))


def _of_job(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that ``fit`` has, too."""
    # Where hosts are named, --slots-per-host is the number of slots of a host without one, as in
    # Horovod; the number that a host has is not limited by it.
    given = {row.name: options.get(row.name) for row in TABLE}
    if any(options.get(name) for name in clusters.HOST_OPTIONS):
        given["slots_per_host"] = None
    if level := options.get("log_level"):
        given["env"] = {"HOROVOD_LOG_LEVEL": level, **(given["env"] or {})}
    return given


def _call(options: Mapping[str, Any]) -> tuple[ScriptCall, str]:
    """Return the call of the script, and a line on its bundle; empty without a bundle."""
    call = script_call(options["command"], os.getcwd())
    packed, words, hosts = None, "", options.get("hosts")
    named = any(options.get(name) for name in clusters.NAMING)
    all_here = all(map(is_local, parse_hosts(hosts))) if hosts else not named  # now and later
    if not options["shared_fs"] and not all_here:
        packed, words = bundle_of(call.folder, call.file)
    mark = mark_of(call.file)
    return replace(call, mark=mark, packed=packed, alias=options["alias"]), words


def _set_logging(level: str | None, *, verbose: bool) -> None:
    if verbose or level:
        logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    for name in ("nbelastic", "distributed", "asyncssh") if verbose else ():
        logging.getLogger(name).setLevel(logging.INFO)
    if level:
        known = {"trace": "DEBUG", "fatal": "CRITICAL"}.get(level, level.upper())
        logging.getLogger("nbelastic").setLevel(known)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the command as Ctrl-C does, so that nothing is left behind."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = [
        (number, signal.signal(number, interrupt))
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) not in (signal.SIG_IGN, None)  # as nohup has it
    ]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
