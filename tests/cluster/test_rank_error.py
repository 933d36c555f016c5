"""Where an error of a rank was raised, as a user looks for it."""

from __future__ import annotations

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.cluster.rank_error import pack_error
from nbelastic.messages import Frame, PackedError
from tests.support.world import run_ranks

USERS = "/home/me/train.py"
TORCHS = "/opt/venv/lib/python3.11/site-packages/torch/autograd/function.py"


def place(*files):
    packed = PackedError("", tuple(Frame(file, 1, "f", "") for file in files), b"")
    return packed.place.file if packed.place else None


@pytest.mark.parametrize(
    "theirs",
    [
        TORCHS,
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "/usr/lib/python3.11/contextlib.py",
        r"C:\Python311\Lib\site-packages\torch\nn.py",
    ],
)
def test_the_place_of_an_error_is_the_users_line(theirs):
    assert place(USERS, theirs) == USERS
    assert place("/home/me/a.py", theirs, USERS, theirs) == USERS
    assert place(theirs) == theirs  # there is no other


def test_a_function_in_a_cell_is_the_users():
    assert place(TORCHS, "<ipython-input-3>", TORCHS) == "<ipython-input-3>"
    assert place() is None


def test_a_mismatch_in_a_function_of_autograds_is_raised_at_the_users_call():
    def rank_main(context):
        tensor = torch.ones(context.rank + 1, requires_grad=True)
        try:
            hvd.allreduce(tensor)
        except RuntimeError as error:
            packed = pack_error(error)
        assert packed.frames[-1].file != __file__  # torch's, which calls nbelastic again
        return packed.place.file, packed.place.text

    assert run_ranks(2, rank_main) == [(__file__, "hvd.allreduce(tensor)")] * 2
