"""Programs of ranks that do not always do the same, on each kind of communicator."""

import os

import pytest

from tests.campaign.play import judge, play
from tests.campaign.programs import program
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
