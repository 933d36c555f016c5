"""``%%elastic_train`` in a shell, with a ``fit`` that starts nothing, and errors in a notebook."""

import signal
import sys
import traceback

import pytest

from nbelastic.driver import outcome
from nbelastic.errors import JobInterrupted, OptionError, PreflightError, RankFailed
from nbelastic.notebook import magics
from nbelastic.notebook.options import train_command
from tests.notebook.fakes import run

pytestmark = pytest.mark.usefixtures("no_client")

# -- the cell ----------------------------------------------------------------------------------


def test_the_result_of_the_cell_is_its_value(shell, fit):
    run(shell, "from __future__ import annotations\nscale = 10")
    cell = "x: nothing = 4 * scale\nx + 2, '{scale} $scale'"
    assert run(shell, f"%%elastic_train\n{cell}").result == (42, "{scale} $scale")
    assert "x" not in shell.user_ns


def test_options_and_variables_on_the_line_reach_fit(shell, fit):
    run(shell, "ranks = 3")
    run(shell, "%%elastic_train --min-np 2 --max-np {ranks} --resources GPU=1 --name resnet\n1")
    assert fit.options == {
        "cluster": None,  # fit makes one of its own
        "min_np": 2,
        "max_np": 3,
        "resources": {"GPU": 1.0},
        "name": "resnet",
        "block": False,
    }


@pytest.mark.parametrize("error", [RankFailed("raised"), JobInterrupted("interrupted")])
def test_out_holds_the_job_although_it_fails(shell, fit, error):
    fit.error, seen = error, []
    fit.while_waiting = lambda: seen.append(shell.user_ns["job"])
    assert run(shell, "%%elastic_train -o job\n7", fails=True) is error
    assert seen == [fit.job]
    assert shell.user_ns["job"] is fit.job


def test_an_interrupt_outside_the_wait_cancels_the_job(shell, fit, monkeypatch):
    monkeypatch.setattr(fit, "while_waiting", lambda: signal.raise_signal(signal.SIGINT))
    assert isinstance(run(shell, "%%elastic_train\n7", fails=True), KeyboardInterrupt)
    assert fit.job.asked == ["cancel"]


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "kind", "says"),
    [
        ("%%elastic_train --max 8\n1", OptionError, "did you mean --max-np?"),
        ("%%elastic_train\n!ls", PreflightError, "'!ls' is for IPython"),
    ],
)
def test_a_wrong_cell_starts_nothing_and_shows_no_frame_of_the_magic(
    shell, fit, capsys, cell, kind, says
):
    error = run(shell, cell, fails=True)
    assert isinstance(error, kind) and says in str(error) and fit.calls == 0
    shown = capsys.readouterr().out
    assert "Error" in shown and ".py" not in shown


@pytest.mark.parametrize("wrong", ["x = = 2", "return 3", "  x", "def f():\n  x = 1\n  global x"])
def test_a_syntax_error_is_shown_as_in_any_other_cell(shell, fit, capsys, wrong):
    shell.run_cell(f"# above\nx = 1\n{wrong}\n")
    expected = capsys.readouterr().out
    error = run(shell, f"%%elastic_train --np 2\nx = 1\n{wrong}\n", fails=True)
    assert isinstance(error, SyntaxError) and fit.calls == 0
    assert capsys.readouterr().out == expected and "line " in expected
    assert "line 5" in str(run(shell, "\n\n%%elastic_train\nx = 1\nx = = 2\n", fails=True))
    capsys.readouterr()
    shell.run_cell("def g(): compile('1 +', 'a file', 'exec')\ng()")
    assert "g()" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [SyntaxError, IndentationError, ValueError])
def test_an_error_of_a_rank_is_shown_with_its_message_alone(shell, kind, capsys):
    shell.user_ns["error"] = outcome._as_instance_of(kind, "what\nwhere\nraised on rank 0")
    error = run(shell, "raise error", fails=True)
    assert isinstance(error, kind)
    shown = "what\nwhere\nraised on rank 0"
    assert capsys.readouterr().out.strip() == f"RankFailed({kind.__name__}): {shown}"
    assert shown in "".join(traceback.format_exception_only(error))


def test_a_conflict_with_a_default_says_where_that_came_from(shell, fit):
    run(shell, "%elastic config np=4")
    fit.refuses = OptionError("np=4 is above max_np=2")
    error = run(shell, "%%elastic_train --max-np 2\n1", fails=True)
    assert "np set by %elastic config" in str(error)
    error = run(shell, "%%elastic_train --np 4 --max-np 2\n1", fails=True)
    assert str(error).endswith("np=4 is above max_np=2 (every option: %%elastic_train?)")


@pytest.mark.parametrize("options", ["np='4'", "num_workers=4"])
def test_a_wrong_option_of_fit_is_shown_with_the_cells_line_and_few_others(shell, options, capsys):
    shell.run_cell("import nbelastic\nraise nbelastic.errors.NotPicklable('no') from OSError()")
    assert capsys.readouterr().out.strip() == "NotPicklable: no"
    shell.run_cell(f"import nbelastic\nnbelastic.fit(print, {options})")
    shown = capsys.readouterr().out
    assert "Option" in shown.splitlines()[-1]
    assert "options.py" not in shown


# -- the cluster -------------------------------------------------------------------------------


class Cluster:
    scheduler_address = "tcp://127.0.0.1:1"


def test_the_cluster_is_a_variable_an_address_or_the_current_client(shell, fit, monkeypatch):
    shell.user_ns |= {"mine": Cluster(), "address": "tcp://10.0.0.5:8786"}
    for name in ("mine", "address"):
        run(shell, f"%%elastic_train --cluster {name}\n1")
        assert fit.options["cluster"] is shell.user_ns[name]
    run(shell, "%%elastic_train --cluster tls://gateway:8786\n1")
    assert fit.options["cluster"] == "tls://gateway:8786"
    client = object()
    monkeypatch.setattr("distributed.Client.current", lambda: client)
    run(shell, "%%elastic_train\n1")
    assert fit.options["cluster"] is client


@pytest.mark.parametrize(
    ("name", "there", "says"),
    [
        ("client", {}, "make one: client = Client(...)"),
        ("mycluster", {"my_cluster": Cluster()}, "did you mean my_cluster?"),
    ],
)
def test_a_wrong_cluster_is_an_error_that_knows_the_right_ones(shell, fit, name, there, says):
    shell.user_ns |= there
    assert says in str(run(shell, f"%%elastic_train --cluster {name}\n1", fails=True))


# -- how it is shown ---------------------------------------------------------------------------


def test_the_manner_is_set_before_the_wait_for_a_job(shell, fit):
    for option, manner in (("--stream all", ("all", False)), ("-q", ("none", True))):
        run(shell, f"%%elastic_train {option}\n1")
        shown = magics.display._shown[fit.job]
        assert (shown.streamer._mode, shown.quiet) == manner


def test_large_variables_are_listed_before_the_start(shell, fit, capsys, monkeypatch):
    monkeypatch.delenv("NBELASTIC_NONINTERACTIVE", raising=False)
    run(shell, "import numpy as np\nbig = np.zeros(3 * 2**20); small = 1; other = np.zeros(2**22)")
    run(shell, "%%elastic_train\nbig.sum() + small;")
    assert "sent to every worker: big 24 MiB;" in capsys.readouterr().out
    for line in ("%%elastic_train -q", "%%elastic_train"):
        run(shell, f"{line}\nbig.sum() + small;")
        monkeypatch.setenv("NBELASTIC_NONINTERACTIVE", "1")
        assert "MiB" not in capsys.readouterr().out


# -- %debug, help and loading ------------------------------------------------------------------


def test_any_error_can_be_looked_into_but_a_ranks(shell, capsys, monkeypatch):
    looked = []  # by IPython's own debugger, which would wait for commands
    look = lambda *_, **__: looked.append(type(sys.last_value).__name__)  # noqa: E731
    monkeypatch.setattr(type(shell.InteractiveTB), "debugger", look)
    for cell in ("1 / 0", "import nbelastic\nraise nbelastic.errors.RankFailed('failed')"):
        run(shell, cell, fails=True)
        capsys.readouterr()
        run(shell, "%debug")
        assert ("call it in a cell without fit" in capsys.readouterr().out) == ("Rank" in cell)
    assert looked == ["ZeroDivisionError"]


def test_the_help_has_every_option_with_an_example_that_can_be_run(shell):
    text = shell.find_cell_magic("elastic_train").__doc__
    examples = [line for line in text.splitlines() if line.strip().startswith("%%elastic")]
    for example in examples:
        assert train_command().read(example.replace("{ranks}", "2").split()[1:])
    for option in train_command().params:
        for name in (*option.opts, *option.secondary_opts):
            assert f"{name} " in text or f"{name}," in text
        assert any(name in line for name in option.opts for line in examples)


def test_the_extension_can_be_loaded_twice_unloaded_and_loaded_again(shell):
    wrapped = shell.find_line_magic("debug")
    magics.load_ipython_extension(shell)
    assert shell.find_line_magic("debug") is wrapped
    for _ in range(2):
        magics.unload_ipython_extension(shell)
        original = shell.find_line_magic("debug")
        assert original.__func__ is type(original.__self__).debug
        assert shell.find_cell_magic("elastic_train") is shell.find_line_magic("elastic") is None
    magics.load_ipython_extension(shell)
    assert shell.find_line_magic("elastic") is not None
