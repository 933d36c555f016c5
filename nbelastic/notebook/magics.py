"""Magics ``%%elastic_train`` and ``%elastic``, layers over ``fit`` and ``Job``."""

from __future__ import annotations
import __future__

import difflib
import functools
import sys
import threading
import traceback
import uuid
from typing import TYPE_CHECKING, Any

from distributed import Client
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

import nbelastic
from nbelastic.driver import wait_interruptibly
from nbelastic.errors import OptionError, RankFailed

from .cell import CellFunction, large_variables
from .commands import Commands
from .display_service import display, silent, write
from .names import users_names
from .options import MagicOptionError, options_help, split, train_command

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

MAGIC = "%%elastic_train"
_FUTURES = __future__.annotations.compiler_flag  # may be set by an earlier cell

NOTHING_HERE = (
    "The error was raised in a rank, which has ended; %debug can only inspect the kernel.\n"
    "To debug the function, call it in a cell without fit, or run the cell without its first line "
    "(%%elastic_train): there it runs as a single rank. Then use %debug again."
)

_MARK = "_nbelastic_original"


@magics_class
class ElasticMagics(Magics):
    """The magics of one notebook."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.commands = Commands(shell.user_ns, write)

    @cell_magic
    def elastic_train(self, line: str, cell: str) -> Any:
        """Run this cell on every rank of an elastic job, from the top.

        The cell is a training function. Variables, functions and modules of the notebook that it
        uses are sent as they are now; what it assigns stays on the ranks. The value of its last
        expression on rank 0 is the result, shown as usual; a semicolon behind it hides it. Lines
        beginning with % or ! belong into another cell. Other cells run in the notebook as ever.

        Which cluster
          --cluster NAME          a variable with a Dask client or cluster, or an address; without
                                  it the notebook's current client, else a LocalCluster for this job
                                      %%elastic_train --cluster client
                                      %%elastic_train --cluster tcp://10.0.0.5:8786

        {options of fit}

        The job and this cell
          --name NAME             name of the job (made up)
                                      %%elastic_train --name resnet
          -o, --out NAME          keep the Job in a variable, from the start and whatever happens
                                      %%elastic_train -o job
          --log-to NAME           a variable with a run of wandb or MLflow, a SummaryWriter of
                                  TensorBoard, or a function: it gets the reported metrics
                                      %%elastic_train --log-to run
          -a, --noblock           do not wait; the value of the cell is the Job
                                      %%elastic_train --noblock -o job
          -b, --block             wait for the end (the default; %elastic config can change it)
                                      %%elastic_train --block
          -q, --quiet             show only the result: no panel, no output, no last line
                                      %%elastic_train --quiet
          -v, --verbose           list the modules of yours that travel with the cell
                                      %%elastic_train --verbose
          --stream RANKS          ranks whose output is shown: rank0 (the default), all or none
                                      %%elastic_train --stream all

        Interrupting the cell stops the job at its next commit, interrupting it again stops it now.
        {name} and $name on the line are replaced by variables: %%elastic_train --np {ranks}
        Defaults for later cells: %elastic config max-np=8; more in %elastic?
        """
        given = train_command(MAGIC).read(split(line, MAGIC))
        options = {**self.commands.defaults, **given}
        try:
            function = self._function(line, cell)
        except SyntaxError as error:
            setattr(error, _MARK, True)
            frames, theirs = traceback.walk_stack(None), self.shell.user_global_ns
            names = (each.f_code.co_filename for each, _ in frames if each.f_globals is theirs)
            error.filename = next(names, error.filename)  # which IPython shows as a cell
            raise error.with_traceback(None) from None
        quiet, verbose = options.pop("quiet", False), options.pop("verbose", False)
        stream = options.pop("stream", "none" if quiet else "rank0")
        out, block = options.pop("out", None), options.pop("block", True)
        options["cluster"] = self._cluster(options.get("cluster"))
        if (run := options.pop("log_to", None)) is not None:
            options["log_to"] = self._variable("--log-to", run)
        options.setdefault("name", f"job-{uuid.uuid4().hex[:8]}")
        large = large_variables(function.captured)
        if sizes := ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in large):
            advice = "load large data on the workers instead"
            _tell(f"sent to every worker: {sizes}; {advice}", quiet)
        job = self._start(function, options, given)
        display.set_options(job, stream, quiet=quiet)
        self.commands.remember(job)
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
        """Look at a job, steer it, and set defaults for later cells.

        %elastic status                     what it does, and its ranks
        %elastic stop                       end it at its next commit
        %elastic cancel                     end it now
        %elastic scale --max-np 6           other limits, from its next commit on
        %elastic scale --min-np 2 --max-np 6
        %elastic logs                       what its ranks have printed, all of it
        %elastic logs --rank 2              … or one of them
        %elastic why                        what was decided on it, and what was seen
        %elastic why --rank 2               … or on one of its ranks
        %elastic jobs                       the jobs of this notebook, the latest first
        %elastic config                     the defaults for later cells
        %elastic config max-np=8 stream=all … set some
        %elastic config max-np=             … no default for this one
        %elastic config --reset             … none at all

        All but jobs and config mean the latest job; --job NAME means another, by its name or by
        the variable that holds it: %elastic stop --job resnet. A cell that waits for its job lets
        no other cell run: start it with --noblock to use these meanwhile.
        """
        self.commands.run(line)

    # -- building a job -------------------------------------------------------------------

    def _function(self, line: str, cell: str) -> CellFunction:
        shell = self.shell
        return CellFunction(
            cell,
            users_names(shell.user_ns, shell.user_ns_hidden),
            filename=f"Cell In[{shell.displayhook.prompt_count}]",
            above="\n" * self._blank_lines() + f"{MAGIC} {line}".rstrip(),
            home=shell.user_global_ns,
            flags=shell.compile.flags & _FUTURES,
        )

    def _blank_lines(self) -> int:
        history = self.shell.history_manager
        raw = history.input_hist_raw[-1] if history is not None else ""
        above, magic, _ = raw.partition(MAGIC)
        return above.count("\n") if magic and not above.strip() else 0

    def _cluster(self, name: str | None) -> Any:
        """Return the value of ``--cluster``; by default the current client, if any."""
        if name is None:
            try:
                return Client.current()  # type: ignore[no-untyped-call]
            except ValueError:  # there is none
                return None
        variables = self.shell.user_ns
        if name in variables:
            return variables[name]  # fit says so if it is no cluster
        if ":" in name:
            return name
        fitting = [each for each, value in list(variables.items()) if _is_cluster(value)]
        fitting = [each for each in fitting if not each.startswith("_")]
        close = difflib.get_close_matches(name, fitting, n=1) or fitting[:3]
        hint = f"did you mean {' or '.join(close)}?" if close else "make one: client = Client(...)"
        raise MagicOptionError(
            f"{MAGIC}: --cluster {name}: no variable has this name, and an address has a port, as "
            f"in tcp://10.0.0.5:8786; {hint}"
        )

    def _variable(self, option: str, name: str) -> Any:
        if name not in self.shell.user_ns:
            raise MagicOptionError(f"{MAGIC}: {option} {name}: no variable has this name")
        return self.shell.user_ns[name]

    def _start(self, function: CellFunction, options: dict[str, Any], given: Any) -> Any:
        try:
            return nbelastic.fit(function, block=False, **options)
        except OptionError as error:
            text = str(error)
            named = [n for n in self.commands.defaults if n not in given and f"{n}=" in text]
            more = f"every option: {MAGIC}?"
            if named:
                which = ", ".join(named)
                more = f"{which} set by %elastic config; %elastic config --reset takes it back"
            raise MagicOptionError(f"{MAGIC}: {text} ({more})") from None


_HELP = str(ElasticMagics.elastic_train.__doc__)
ElasticMagics.elastic_train.__doc__ = _HELP.replace(
    "{options of fit}", options_help(MAGIC).lstrip("\n").removeprefix(" " * 8)
)


def _is_cluster(value: Any) -> bool:
    """Return whether a value is a cluster by its class, without reading its attributes."""
    if isinstance(value, type):
        return False
    return isinstance(value, Client) or hasattr(type(value), "scheduler_address")


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


# -- the extension ---------------------------------------------------------------------------------


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics, and make ``%debug`` explain itself if the last error was a rank's."""
    shell.register_magics(ElasticMagics)
    find: Any = shell.find_line_magic  # it has no annotations, and may import the magic
    show_in_shell: Any = shell.showsyntaxerror
    original = find("debug")
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(show_in_shell)
    def show(filename: str | None = None, *args: Any, **kwargs: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, RankFailed):  # also the SyntaxError that a rank has raised
            plain = type(type(error).__name__, (RankFailed,), {})
            shell.showtraceback((plain, plain(str(error)), None))
        elif hasattr(error, _MARK):
            show_in_shell(filename)  # as if IPython had compiled the cell
        else:
            show_in_shell(filename, *args, **kwargs)

    @functools.wraps(original)
    def debug(line: str = "", *args: Any, **kwargs: Any) -> Any:
        if line.strip() or not isinstance(getattr(sys, "last_value", None), RankFailed):
            return original(line, *args, **kwargs)
        write(NOTHING_HERE + "\n")
        return None

    setattr(debug, _MARK, original)
    shell.magics_manager.magics["line"]["debug"] = debug
    shell.showsyntaxerror = show  # type: ignore[method-assign]


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Unregister the magics, and restore ``%debug``."""
    magics = shell.magics_manager.magics
    magics["cell"].pop("elastic_train", None)
    magics["line"].pop("elastic", None)
    shell.magics_manager.registry.pop(ElasticMagics.__name__, None)
    if (original := getattr(magics["line"].get("debug"), _MARK, None)) is not None:
        magics["line"]["debug"] = original
    vars(shell).pop("showsyntaxerror", None)
