"""``%%elastic_train`` on real workers."""

from __future__ import annotations

import pytest

import nbelastic
from nbelastic.errors import RankFailed
from tests.notebook.shells import run


@pytest.fixture
def notebook(shell, crew):
    """A shell whose variable ``client`` reaches four workers."""
    shell.user_ns["client"] = crew.client
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
(answer(), int(total), type(Net()).__name__)"""
    assert run(notebook, cell).result == (42, 2, "Net")
    job = notebook.user_ns["job"]
    assert isinstance(job, nbelastic.Job)
    assert job.results()[1] is None
    assert "rank 0" in job.logs(0) and "rank 1" in job.logs(1)
    assert "scale" not in notebook.user_ns


def test_an_error_of_a_rank_shows_the_cells_line_with_its_number(notebook):
    cell = "%%elastic_train --cluster client --np 2 --stream none\ndata = []\n\ndata[3]"
    error = run(notebook, cell, fails=True)
    assert isinstance(error, RankFailed) and isinstance(error, IndexError)
    assert 'File "Cell In[1]", line 4, in <module>\n    data[3]' in str(error)


def test_a_value_that_cannot_travel_does_not_fail_the_job(notebook):
    cell = (
        "%%elastic_train --cluster client --np 2 --stream none\nimport threading\nthreading.Lock()"
    )
    value = run(notebook, cell).result
    assert repr(value).startswith("<unlocked _thread.lock")
    assert "cannot be pickled" in str(value)
