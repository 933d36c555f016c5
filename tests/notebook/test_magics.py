"""``%%elastic_train`` in a shell, with a ``fit`` that starts nothing, and errors in a notebook."""

import signal
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
    run(shell, "scale = 10")
    cell = "x = 4 * scale\nx + 2, '{scale} $scale'"
    assert run(shell, f"%%elastic_train\n{cell}").result == (42, "{scale} $scale")
    assert "x" not in shell.user_ns


@pytest.mark.parametrize("magic", ["elastic_train", "train"])
def test_options_and_variables_on_the_line_reach_fit(shell, fit, magic):
    run(shell, "ranks = 3")
    line = "--min-np 2 --max-np {ranks}"
    if magic == "train":
        run(shell, f'%alias_magic --cell train elastic_train --params "{line}"')
        line = ""
    run(shell, f"%%{magic} {line} --resources GPU=1 --name resnet\n1")
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
        ("%%elastic_train --max 8\n1", OptionError, "--max-np"),
        ("%%elastic_train\n!ls", PreflightError, "'!ls' is for IPython"),
        ("%%elastic_train\nx = 1\nx = = 2", PreflightError, "line 3\n    x = = 2\n"),
        ("%%elastic_train\nreturn 3", PreflightError, "line 2\n    return 3\n"),
        ("%%elastic_train --cluster client\n1", OptionError, "--cluster client: no variable"),
    ],
)
def test_a_wrong_cell_starts_nothing_and_shows_no_frame_of_the_magic(
    shell, fit, capsys, cell, kind, says
):
    error = run(shell, cell, fails=True)
    assert isinstance(error, kind) and says in str(error) and fit.calls == 0
    shown = capsys.readouterr().out
    assert "Error" in shown and ".py" not in shown


@pytest.mark.parametrize("kind", [SyntaxError, IndentationError, ValueError])
def test_an_error_of_a_rank_is_shown_with_its_message(shell, kind, capsys):
    shell.user_ns["error"] = outcome._as_instance_of(kind, "what\nwhere\nraised on rank 0")
    error = run(shell, "raise error", fails=True)
    assert isinstance(error, kind)
    shown = "what\nwhere\nraised on rank 0"
    assert capsys.readouterr().out.strip().endswith(shown)
    assert shown in "".join(traceback.format_exception_only(error))


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


# -- how it is shown ---------------------------------------------------------------------------


def test_the_manner_is_set_before_the_wait_for_a_job(shell, fit):
    for option, manner in (("--stream all", ("all", False)), ("-q", ("none", True))):
        run(shell, f"%%elastic_train {option}\n1")
        shown = magics.display._shown[fit.job]
        assert (shown.streamer._mode, shown.quiet) == manner


# -- help and loading --------------------------------------------------------------------------


def test_the_help_has_every_option_with_its_meaning(shell):
    text = shell.find_cell_magic("elastic_train").__doc__
    assert max(map(len, text.splitlines())) <= 100
    for option in train_command().params:
        for name in (*option.opts, *option.secondary_opts):
            assert f"{name} " in text or f"{name}," in text
        assert option.help.split()[0] in text


def test_the_extension_can_be_loaded_twice_unloaded_and_loaded_again(shell):
    magics.load_ipython_extension(shell)
    for _ in range(2):
        magics.unload_ipython_extension(shell)
        assert shell.find_cell_magic("elastic_train") is shell.find_line_magic("elastic") is None
    magics.load_ipython_extension(shell)
    assert shell.find_line_magic("elastic") is not None
