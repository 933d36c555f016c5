"""A bug that is put in on purpose must be found: else the simulation sees nothing."""

from __future__ import annotations

import pytest

from .mutations import MUTATIONS, SHOWN_BY_PLANNED_CHANGES
from .world import simulate

MOST = 300  # schedules within which each bug must be found


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_invariant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, attribute, make, last = MUTATIONS[name]
    planned = name in SHOWN_BY_PLANNED_CHANGES
    for seed in (last, *range(MOST)):
        with monkeypatch.context() as patch:
            patch.setattr(target, attribute, make(getattr(target, attribute)))
            problem = _problem(seed, planned)
        if problem and not _problem(seed, planned):  # without the bug, nothing is wrong there
            print(f"found with seed {seed}: {problem}")
            return
    pytest.fail(f"{MOST} schedules did not show that {name}")


def _problem(seed: int, planned: bool) -> str:
    try:
        simulate(seed, planned=planned)
    except Exception as error:  # however it shows
        return f"{type(error).__name__}: {error}"
    return ""
