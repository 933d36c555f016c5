"""Programs of ranks that do not always do the same, on each kind of communicator."""

import os
from types import SimpleNamespace

import pytest

from nbelastic.collectives import Communicator
from nbelastic.torch.ops.coordination import comparison
from tests.campaign.play import Course, judge, play
from tests.campaign.programs import Program, Step, program
from tests.collectives.worlds import SOME_KINDS

FIRST, COUNT = map(int, os.environ.get("CAMPAIGN", "0:25").split(":"))
KINDS = [*SOME_KINDS, *(["hierarchical"] if "CAMPAIGN" in os.environ else [])]


@pytest.mark.parametrize("names", [False, True], ids=["by-order", "by-name"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_program_ends_by_a_result_or_by_an_error_that_names_the_cause(kind, names):
    for seed in range(FIRST, FIRST + COUNT):
        each = program(seed, names)
        courses = play(each, kind)
        trouble = judge(each, courses)
        assert trouble is None, f"{trouble}\n{each}\n{courses}"


def test_ranks_that_do_not_compare_are_found_out(monkeypatch):
    """What is judged can fail: without the comparison, shapes of one size are added up."""
    monkeypatch.setattr(Communicator, "agree", lambda self, _, number=0: [number] * self.size)
    monkeypatch.setattr(comparison, "coordination_over", lambda _: SimpleNamespace(compare=print))
    steps = tuple((Step("allreduce", shape=shape),) for shape in ((2, 3), (3, 2)))
    differs = Program(0, steps, goes_on=True)
    assert "do not disagree" in judge(differs, play(differs, "gloo"))


def test_a_rank_that_hangs_is_found_out():
    waits = Program(0, ((Step("barrier"),), (Step("barrier"),)), goes_on=True)
    courses = [Course(steps=[None]), Course(end=TimeoutError("it hangs"))]
    assert judge(waits, courses) == "rank 1 hangs in step 0"
