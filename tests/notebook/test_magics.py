"""``%%elastic_train`` in a shell, with a ``fit`` that starts nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
import types

import cloudpickle
import pytest

from nbelastic.errors import JobInterrupted, NbelasticError, OptionError, RankFailed
from nbelastic.notebook import magics
from nbelastic.notebook.options import train_command
from tests.notebook.shells import run

pytestmark = pytest.mark.usefixtures("no_client")

# -- the cell ----------------------------------------------------------------------------------


def test_the_result_of_the_cell_is_its_value(shell, fit):
    run(shell, "scale = 10")
    assert run(shell, "%%elastic_train --np 2\nx = 4 * scale\nx + 2").result == 42
    assert fit.options["np"] == 2
    assert "x" not in shell.user_ns


def test_a_semicolon_hides_the_result(shell, fit):
    assert run(shell, "%%elastic_train\n42;").result is None


def test_options_reach_fit_under_their_names(shell, fit):
    run(shell, "%%elastic_train --min-np 2 --max-np 4 --resources GPU=1 --name resnet\n1")
    del fit.options["cluster"]
    assert fit.options == {
        "min_np": 2,
        "max_np": 4,
        "resources": {"GPU": 1.0},
        "name": "resnet",
        "block": False,
    }


def test_a_variable_on_the_line_is_expanded_and_the_body_is_not(shell, fit):
    run(shell, "ranks = 3")
    assert run(shell, "%%elastic_train --np {ranks}\n'{ranks} $ranks'").result == "{ranks} $ranks"
    assert fit.options["np"] == 3


def test_other_cells_are_never_touched(shell, fit):
    run(shell, "1 + 1")
    assert fit.calls == 0


def test_noblock_gives_the_job_at_once(shell, fit):
    result = run(shell, "%%elastic_train --noblock\n1").result
    assert result is fit.job
    assert not fit.job.waited


def test_out_holds_the_job_before_the_wait_begins(shell, fit):
    fit.while_waiting = lambda: seen.append(shell.user_ns["job"])
    seen = []
    assert run(shell, "%%elastic_train -o job\n7").result == 7
    assert seen == [fit.job]


@pytest.mark.parametrize("error", [RankFailed("raised"), JobInterrupted("interrupted")])
def test_out_holds_the_job_although_it_fails(shell, fit, error):
    fit.error = error
    assert run(shell, "%%elastic_train -o job\n7", fails=True) is error
    assert shell.user_ns["job"] is fit.job


def test_an_interrupt_outside_the_wait_cancels_the_job(shell, fit):
    def interrupt():
        raise KeyboardInterrupt

    fit.while_waiting = interrupt
    error = run(shell, "%%elastic_train\n7", fails=True)
    assert isinstance(error, KeyboardInterrupt)
    assert fit.job.asked == ["cancel"]


def test_a_future_import_of_an_earlier_cell_holds_in_this_one(shell, fit):
    run(shell, "from __future__ import annotations")
    assert run(shell, "%%elastic_train\nx: nothing = 1\nx").result == 1


def test_other_threads_than_the_main_one_wait_uninterrupted(shell, fit):
    results = []
    magic = shell.find_cell_magic("elastic_train")
    thread = threading.Thread(target=lambda: results.append(magic("", "5")))
    thread.start()
    thread.join(10)
    assert results == [5]
    assert not fit.job.waited


# -- errors ------------------------------------------------------------------------------------


def test_a_wrong_option_is_an_error_of_the_cell(shell, fit):
    error = run(shell, "%%elastic_train --max 8\n1", fails=True)
    assert isinstance(error, OptionError)
    assert "did you mean --max-np?" in str(error)
    assert fit.calls == 0


@pytest.mark.parametrize("source", ["%%elastic_train --max 8\n1", "%%elastic_train\n!ls"])
def test_an_error_in_the_cell_shows_no_frame_of_the_magic(shell, fit, capsys, source):
    run(shell, source, fails=True)
    shown = capsys.readouterr().out
    assert "Error: " in shown
    assert "magics.py" not in shown


def test_an_empty_cell_is_refused(shell, fit):
    assert "no code" in str(run(shell, "%%elastic_train\n\n", fails=True))


def test_a_shell_line_is_refused_with_its_number(shell, fit):
    error = run(shell, "%%elastic_train\nx = 1\n!ls\n", fails=True)
    assert isinstance(error, NbelasticError)
    assert "line 3: '!ls'" in str(error)


def test_a_syntax_error_has_the_line_as_the_cell_numbers_it(shell, fit, capsys):
    error = run(shell, "\n\n%%elastic_train --np 2\nx = 1\nx = = 2\n", fails=True)
    assert isinstance(error, SyntaxError)
    assert error.lineno == 5
    assert fit.calls == 0
    shown = capsys.readouterr().out
    assert "x = = 2" in shown
    assert "cell.py" not in shown


def test_an_error_of_a_rank_names_the_cell_and_the_line(shell, fit):
    run(shell, "1")
    error = run(shell, "%%elastic_train\nx = 0\n1 / x", fails=True)
    frame = error.__traceback__
    while frame.tb_next:
        frame = frame.tb_next
    assert frame.tb_frame.f_code.co_filename == "Cell In[2]"
    assert frame.tb_lineno == 3


def test_a_conflict_with_a_default_says_where_that_came_from(shell, fit):
    run(shell, "%elastic config np=4")
    fit.refuses = OptionError("np=4 is above max_np=2")
    error = run(shell, "%%elastic_train --max-np 2\n1", fails=True)
    assert "np set by %elastic config" in str(error)
    fit.refuses = OptionError("np=5 is above max_np=2")
    error = run(shell, "%%elastic_train --np 5 --max-np 2\n1", fails=True)
    assert str(error) == (
        "%%elastic_train: np=5 is above max_np=2 (every option: %%elastic_train?)"
    )


def test_a_value_that_fit_refuses_shows_no_frame_of_nbelastic(shell, capsys):
    run(shell, "%%elastic_train --min-np 5 --max-np 2\n1", fails=True)
    shown = capsys.readouterr().out
    assert shown.strip() == (
        "MagicOptionError: %%elastic_train: min_np=5 is above max_np=2 "
        "(every option: %%elastic_train?)"
    )


# -- the cluster -------------------------------------------------------------------------------


class Cluster:
    scheduler_address = "tcp://127.0.0.1:1"


def test_without_a_client_fit_makes_a_cluster_of_its_own(shell, fit):
    run(shell, "%%elastic_train\n1")
    assert fit.options["cluster"] is None


def test_the_current_client_is_taken(shell, fit, monkeypatch):
    client = object()
    monkeypatch.setattr("distributed.Client.current", lambda: client)
    run(shell, "%%elastic_train\n1")
    assert fit.options["cluster"] is client


def test_a_variable_names_the_cluster(shell, fit):
    shell.user_ns["mine"] = cluster = Cluster()
    shell.user_ns["address"] = "tcp://10.0.0.5:8786"
    run(shell, "%%elastic_train --cluster mine\n1")
    assert fit.options["cluster"] is cluster
    run(shell, "%%elastic_train --cluster address\n1")
    assert fit.options["cluster"] == "tcp://10.0.0.5:8786"


def test_an_address_is_a_cluster(shell, fit):
    run(shell, "%%elastic_train --cluster tls://gateway:8786\n1")
    assert fit.options["cluster"] == "tls://gateway:8786"


def test_a_wrong_cluster_is_an_error_that_knows_the_right_ones(shell, fit):
    error = run(shell, "%%elastic_train --cluster client\n1", fails=True)
    assert "make one: client = Client(...)" in str(error)
    shell.user_ns["my_cluster"] = Cluster()
    error = run(shell, "%%elastic_train --cluster mycluster\n1", fails=True)
    assert "did you mean my_cluster?" in str(error)
    shell.user_ns["number"] = 5
    error = run(shell, "%%elastic_train --cluster number\n1", fails=True)
    assert "--cluster number: the variable holds 'int'" in str(error)


# -- how it is shown ---------------------------------------------------------------------------


def test_the_manner_is_set_before_the_wait_for_a_job(shell, fit, monkeypatch):
    manners = []
    monkeypatch.setattr(
        magics.display, "set_options", lambda *of, **more: manners.append((of, more))
    )
    run(shell, "%%elastic_train --stream all\n1")
    run(shell, "%%elastic_train -q\n1")
    assert [(of[1], more["quiet"]) for of, more in manners] == [("all", False), ("none", True)]


def test_large_variables_are_listed_before_the_start(shell, fit, capsys, monkeypatch):
    monkeypatch.delenv("NBELASTIC_NONINTERACTIVE", raising=False)
    run(shell, "import numpy as np\nbig = np.zeros(3 * 2**20); small = 1; other = np.zeros(2**22)")
    run(shell, "%%elastic_train\nbig.sum() + small;")
    assert "sent to every worker: big 24 MiB;" in capsys.readouterr().out
    for line in ("%%elastic_train -q", "%%elastic_train"):
        run(shell, f"{line}\nbig.sum() + small;")
        monkeypatch.setenv("NBELASTIC_NONINTERACTIVE", "1")
        assert "MiB" not in capsys.readouterr().out


def test_the_function_tells_what_it_has_captured(shell, fit):
    run(shell, "import math\nlr = 0.1\ndef f(): return lr")
    run(shell, "%%elastic_train --noblock\nf() + math.pi")
    assert list(fit.function.captured) == ["f", "math"]
    assert isinstance(fit.function.captured["math"], types.ModuleType)
    assert fit.function.__name__ == "Cell In[2]"


def test_a_helper_of_the_notebook_sees_what_the_cell_assigns(shell, fit):
    run(shell, "lr = 0.1\ndef rate():\n    return lr")
    assert run(shell, "%%elastic_train\nlr = 0.2\nrate()").result == 0.2
    assert shell.user_ns["lr"] == 0.1


# -- help and loading --------------------------------------------------------------------------


def test_the_help_has_every_option_with_an_example(shell):
    text = shell.find_cell_magic("elastic_train").__doc__
    for option in train_command().params:
        for name in (*option.opts, *option.secondary_opts):
            assert f"{name} " in text or f"{name}," in text
        examples = [line for line in text.splitlines() if line.strip().startswith("%%elastic")]
        assert any(name in line for name in option.opts for line in examples)


def test_every_example_of_the_help_can_be_run(shell):
    text = shell.find_cell_magic("elastic_train").__doc__
    examples = [line.split(maxsplit=1)[1] for line in text.splitlines() if "  %%elastic" in line]
    assert len(examples) > 15
    for example in examples:
        assert train_command().read(example.replace("{ranks}", "2").split())


def test_the_extension_can_be_unloaded_and_loaded_again(shell):
    from nbelastic.notebook import load_ipython_extension, unload_ipython_extension

    unload_ipython_extension(shell)
    assert shell.find_cell_magic("elastic_train") is None
    assert shell.find_line_magic("elastic") is None
    unload_ipython_extension(shell)
    load_ipython_extension(shell)
    assert shell.find_line_magic("elastic") is not None


@pytest.mark.slow
def test_the_package_loads_neither_ipython_nor_ipywidgets():
    code = (
        "import nbelastic.notebook, nbelastic.notebook.cell, nbelastic.notebook.names, sys;"
        "print([m for m in ('IPython', 'ipywidgets', 'torch') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_function_that_fit_gets_can_travel(shell, fit):
    run(shell, "lr = 0.5")
    run(shell, "%%elastic_train --noblock\nlr * 2")
    assert cloudpickle.loads(cloudpickle.dumps(fit.function))() == 1.0
