"""Cells on real workers, and what was trained there: it comes back with ``pull``."""

import sys
import threading

import pytest
import torch

import nbelastic
from nbelastic.errors import JobStopped, OptionError, RankFailed
from tests.notebook.fakes import run
from tests.support.training import step_by_step

TRAIN = """
import torch
import nbelastic.torch as hvd

hvd.init()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(bert.parameters(), lr=0.1))
state = hvd.elastic.TorchState(bert, optimizer, step=0)

@hvd.elastic.run
def loop(state):
    while state.step < 3:
        optimizer.zero_grad()
        bert(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state.step += 1
        history.append(state.step)
        state.commit()

loop(state)
made = torch.nn.Linear(1, 1)
"""


@pytest.fixture
def notebook(shell, crew):
    """A shell with a client, a model and a list that a cell trains and fills."""
    torch.manual_seed(0)
    shell.user_ns |= {"client": crew.client, "bert": torch.nn.Linear(4, 1), "history": [0]}
    return shell


def test_a_cell_trains_on_all_ranks_and_shows_rank_0s_value(notebook):
    run(notebook, "import nbelastic\nbase = 40\ndef answer():\n    return base + scale")
    cell = """%%elastic_train --cluster client --np 2 -o job --stream none
import torch
import nbelastic.torch as hvd

hvd.init()
scale = 2

class Net(torch.nn.Module):
    pass

total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
print("rank", nbelastic.rank())
(answer(), int(total), Net())"""
    *numbers, net = run(notebook, cell).result
    assert numbers == [42, 2] and type(net).__name__ == "Net"
    job = notebook.user_ns["job"]
    assert job.results()[1] is None
    assert "rank 0" in job.logs(0) and "rank 1" in job.logs(1)
    assert "scale" not in notebook.user_ns
    error = run(notebook, f"{cell}\n[][3]", fails=True)
    assert isinstance(error, RankFailed) and isinstance(error, IndexError)
    assert 'File "Cell In[3]", line 14, in <module>\n    [][3]' in str(error)


def test_a_cell_says_what_is_unchanged_and_brings_back_what_it_is_told_to(notebook, capsys):
    bert, history = notebook.user_ns["bert"], notebook.user_ns["history"]
    before = bert.weight.detach().clone()
    run(notebook, "%%elastic_train --cluster client --np 2" + TRAIN)
    assert torch.equal(bert.weight, before) and history == [0]
    said = "`bert` of this notebook is unchanged; --pull bert brings it back"
    assert said in capsys.readouterr().out

    run(notebook, "%%elastic_train --cluster client --np 2 --pull bert,history,made" + TRAIN)
    assert torch.allclose(bert.weight, before - 3 * 0.1 * 2)
    assert history == [0, 1, 2, 3] and notebook.user_ns["history"] is history
    assert isinstance(notebook.user_ns["made"], torch.nn.Linear)  # the cell has made it
    assert "unchanged" not in capsys.readouterr().out


def test_a_job_that_is_stopped_brings_back_what_it_has(crew):
    model, seen = torch.nn.Linear(1, 1, bias=False), {"steps": 0}

    def train():
        def step(state):
            with torch.no_grad():
                model.weight.fill_(7.0)
            seen["steps"] += 1

        step_by_step(step)

    job = crew.fit(train, np=2, block=False, pull=("model", "seen"))
    while job.status.commits < 1:
        assert not job.wait(0.05)
    job.stop()
    assert job.pull(timeout=60) == {"model": model, "seen": seen}
    assert model.weight.item() == 7.0 and seen["steps"] >= 1
    with pytest.raises(JobStopped):
        job.result()


def test_a_variable_that_does_not_come_back_costs_no_result(crew):
    found = []

    def train():
        found.append(threading.Lock())
        return 7

    with pytest.warns(UserWarning, match="pull='found': it cannot be sent"):
        job = nbelastic.fit(train, np=1, pull="found", cluster=crew.client)
    assert job.result() == 7
    with pytest.raises(OptionError, match="it cannot be sent"):
        job.pull()


# -- modules of the notebook's folder, which the workers of ``crew`` do not see --------------------

HELPERS = """
from dataclasses import dataclass

@dataclass
class Answer:
    version: int

def answer():
    from models.inner import scale
    return Answer(VERSION * scale)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "inner.py").write_text("from . import base\nscale = base.scale\n")
    (tmp_path / "models" / "base.py").write_text("scale = 10\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("helpers", "models", "models.inner", "models.base", "private"):
        sys.modules.pop(name, None)


def edit(folder, version):
    (folder / "helpers.py").write_text(HELPERS.replace("VERSION", str(version)))


def test_modules_travel_with_each_job_and_edits_count(crew, shell, folder):
    edit(folder, 1)
    shell.user_ns["client"] = crew.client
    run(shell, "import nbelastic\nfrom helpers import answer, Answer")
    cell = "%%elastic_train --cluster client --np 2 -o job --stream none --verbose\nanswer()"
    first = run(shell, cell).result
    assert first.version == 10
    assert type(first) is sys.modules["helpers"].Answer
    assert set(shell.user_ns["job"].modules.sources) == {
        *("helpers", "models", "models.inner", "models.base")
    }
    edit(folder, 222)
    assert run(shell, cell).result.version == 2220
    lazily = cell.replace("\nanswer()", "\nimport helpers\nhelpers.answer().version")
    edit(folder, 3)
    assert run(shell, lazily).result == 30
    assert not any(crew.client.run(lambda: "helpers" in sys.modules).values())
