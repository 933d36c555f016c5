"""Magics ``%%elastic_train`` and ``%elastic``, layers over ``fit`` and ``Job``."""

from __future__ import annotations

import inspect
import threading
import uuid
from typing import TYPE_CHECKING, Any

from distributed import Client
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

import nbelastic
from nbelastic.driver import Job, wait_interruptibly
from nbelastic.driver.options import LIMITS, ROWS, count
from nbelastic.driver.parser import LineOption, did_you_mean
from nbelastic.errors import OptionError
from nbelastic.render import JobSnapshot, status_lines

from .cell import CellFunction
from .display_service import display, silent, write
from .names import users_names
from .options import MagicCommand, MagicOptionError, split, train_command

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load_ipython_extension", "unload_ipython_extension"]

MAGIC, LINE_MAGIC = "%%elastic_train", "%elastic"
CHANGES = frozenset({"stop", "cancel", "scale"})  # a job that has ended is left alone


@magics_class
class ElasticMagics(Magics):
    """The magics of one notebook."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._latest: Any = None  # job of a cell, with its result

    @cell_magic
    def elastic_train(self, line: str, cell: str) -> Any:
        """Run this cell on every rank of an elastic job, from the top.

        The cell is a training function. Variables, functions and modules of the notebook that it
        uses are sent as they are now; what it assigns stays on the ranks. The value of its last
        expression on rank 0 is the result, shown as usual; a semicolon behind it hides it. Lines
        beginning with % or ! belong into another cell. Other cells run in the notebook as ever.

        {options}

        Interrupting the cell stops the job at its next commit, interrupting it again stops it now.
        {name} and $name on the line are replaced by variables: %%elastic_train --np {ranks}
        Options of your own: %alias_magic --cell train elastic_train --params "--max-np 8"
        """
        options = train_command(MAGIC).read(split(line, MAGIC))
        function = CellFunction(
            cell,
            users_names(self.shell.user_ns, self.shell.user_ns_hidden),
            filename=f"Cell In[{self.shell.displayhook.prompt_count}]",
            above=f"{MAGIC} {line}".rstrip(),
            home=self.shell.user_global_ns,
        )
        quiet, verbose = options.pop("quiet", False), options.pop("verbose", False)
        stream = options.pop("stream", "none" if quiet else "rank0")
        out, block = options.pop("out", None), options.pop("block", True)
        options["cluster"] = self._cluster(options.get("cluster"))
        if (run := options.pop("log_to", None)) is not None:
            options["log_to"] = self._variable("--log-to", run)
        options.setdefault("name", f"job-{uuid.uuid4().hex[:8]}")
        try:
            job = nbelastic.fit(function, block=False, **options)
        except OptionError as error:
            raise MagicOptionError(f"{MAGIC}: {error} (every option: {MAGIC}?)") from None
        display.set_options(job, stream, quiet=quiet)
        self._latest = job
        if verbose:
            write(job.modules.describe())
        if out is not None:
            self.shell.user_ns[out] = job
        if not block:
            return job
        try:
            return _wait(job)
        finally:
            _bring_back(job, quiet)

    @line_magic
    def elastic(self, line: str) -> None:
        """Look at the latest job, and steer it.

        %elastic status                     what it does, and its ranks
        %elastic stop                       end it at its next commit
        %elastic cancel                     end it now
        %elastic scale --max-np 6           other limits, from its next commit on
        %elastic scale --min-np 2 --max-np 6
        %elastic logs                       what its ranks have printed, all of it
        %elastic logs --rank 2              … or one of them
        %elastic why                        what was decided on it, and what was seen
        %elastic why --rank 2               … or on one of its ranks

        All mean the latest job of this notebook; any other job has them as methods: job.stop(). A
        cell that waits for its job lets no other cell run: start it with --noblock to use these
        meanwhile.
        """
        jobs = [each for each in list(self.shell.user_ns.values()) if isinstance(each, Job)]
        jobs += [self._latest] if self._latest is not None else []
        latest = max(jobs, key=lambda job: job.started, default=None)
        write(run_command(line, latest) + "\n")

    # -- building a job -------------------------------------------------------------------

    def _cluster(self, name: str | None) -> Any:
        """Return the value of ``--cluster``; by default the current client, if any."""
        if name is None:
            try:
                return Client.current()  # type: ignore[no-untyped-call]
            except ValueError:  # there is none
                return None
        if ":" in name:  # an address has a port
            return name
        return self._variable("--cluster", name)  # fit says so if it is no cluster

    def _variable(self, option: str, name: str) -> Any:
        if name not in self.shell.user_ns:
            raise MagicOptionError(f"{MAGIC}: {option} {name}: no variable has this name")
        return self.shell.user_ns[name]


_HELP = inspect.cleandoc(str(ElasticMagics.elastic_train.__doc__))
ElasticMagics.elastic_train.__doc__ = _HELP.replace("{options}", train_command().options_help())


def _wait(job: Any) -> Any:
    """Wait for a job and return its result. Only the main thread can be interrupted."""
    try:
        if threading.current_thread() is threading.main_thread():
            wait_interruptibly(job)
        return job.result()
    except KeyboardInterrupt:
        if not job.done():  # interrupted just outside the wait that handles it
            job.cancel()
        raise


def _bring_back(job: Any, quiet: bool) -> None:
    """Bring back the variables of `--pull`, and name the models of the notebook left unchanged."""
    returned = nbelastic.driver.driver_of(job).log.returned
    if job.done() and returned.pulled:
        back = ", ".join(f"`{name}`" for name in job.pull())
        _tell(f"back from rank 0: {back}", quiet)
    left = [name for name in returned.trained if name not in returned.pulled]
    if left:
        verb, it = ("are", "them") if len(left) > 1 else ("is", "it")
        names = ", ".join(f"`{name}`" for name in left)
        pull = f"--pull {','.join(left)} brings {it} back"
        _tell(f"{names} of this notebook {verb} unchanged; {pull}", quiet)


def _tell(words: str, quiet: bool) -> None:
    if not (quiet or silent()):
        write(words + "\n")


# -- commands of %elastic -------------------------------------------------------------------------


_RANK = LineOption(["--rank"], count(0))

COMMANDS: dict[str, list[LineOption]] = {
    "status": [],
    "stop": [],
    "cancel": [],
    "scale": [LineOption.of(ROWS[name]) for name in LIMITS],
    "logs": [_RANK],
    "why": [_RANK],
}
"""The options of each command."""


def run_command(words: str, job: Any) -> str:
    """Run the words after ``%elastic`` on a job, or on none; return the lines to show."""
    name, *given = split(words, LINE_MAGIC) or [""]
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        what = f"there is no command {name!r}" if name else "a command is missing"
        raise MagicOptionError(f"{LINE_MAGIC}: {what}{hint} (every command: {LINE_MAGIC}?)")
    values = MagicCommand(f"{LINE_MAGIC} {name}", COMMANDS[name]).read(given)
    if job is None:
        raise MagicOptionError(
            f"{LINE_MAGIC}: there is no job yet; run a cell with %%elastic_train --noblock, "
            "or nbelastic.fit(..., block=False), first"
        )
    if name in CHANGES and job.done():
        return f"{job.name} has ended already: {job.status.state}"
    try:
        return _carry_out(name, job, values)
    except OptionError as error:
        raise MagicOptionError(f"{LINE_MAGIC} {name}: {error} (more: {LINE_MAGIC}?)") from None


def _carry_out(name: str, job: Any, values: dict[str, Any]) -> str:
    if name == "status":
        return "\n".join(status_lines(JobSnapshot.of(job)))
    if name == "scale" and not values:
        raise OptionError(f"a limit is missing, as in {LINE_MAGIC} scale --min-np 2 --max-np 6")
    found = getattr(job, name)(**values)
    if name == "logs":
        return str(found).removesuffix("\n") or f"{job.name}: nothing was printed yet"
    if name == "why":
        return str(found)
    if name == "cancel":
        return f"{job.name} stops now"
    if name == "stop":
        return f"{job.name} stops at its next commit ({LINE_MAGIC} cancel stops it at once)"
    changes = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"{job.name}: {changes} from its next commit on"


# -- the extension ---------------------------------------------------------------------------------


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics."""
    shell.register_magics(ElasticMagics)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Unregister the magics."""
    magics = shell.magics_manager.magics
    magics["cell"].pop("elastic_train", None)
    magics["line"].pop("elastic", None)
    shell.magics_manager.registry.pop(ElasticMagics.__name__, None)
