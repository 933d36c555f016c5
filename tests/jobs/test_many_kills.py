"""The same again and again, at any moment: real workers, really killed, while they train."""

from __future__ import annotations

import random

import pytest

from nbelastic.errors import RankFailed
from tests.support.clusters import kinds
from tests.support.training import Workload, check


@pytest.mark.timeout(600)
@pytest.mark.parametrize("goal", [8, pytest.param(50, marks=pytest.mark.nightly)])
def test_kills_at_random_moments(crew, tmp_path, goal):
    dice = random.Random(20261121)
    kills = number = 0
    while kills < goal:
        number += 1
        marks = tmp_path / str(number)
        marks.mkdir()
        work = Workload(marks, epochs=40, seconds=0.01)
        job = crew.fit(work, np=3, min_np=1, max_np=4, block=False, name=f"kills-{number}")
        killed: set[str] = set()
        while not job.wait(dice.uniform(0.0, 0.4)):
            ranks = job.status.ranks
            members = [r.worker for r in ranks if r.rank is not None and r.worker not in killed]
            holders = [r.worker for r in ranks if r.commits and r.worker not in killed]
            target = dice.choice(members) if members else None
            if set(holders) - {target} and target and kills < goal:  # one with the state is left
                kills += crew.kill(target)
                killed.add(target)
        assert "restarted" not in kinds(job)
        problem = job.exception()
        if isinstance(problem, RankFailed):  # killed when others had returned: nobody can go back
            assert "ended before they returned" in str(problem)
        else:
            check(job.results(), work)
