"""Details of the history, in words."""

from __future__ import annotations

import pytest

from nbelastic import messages as why
from nbelastic.driver.records.job_log import history_detail, reset_detail, straggler_detail
from nbelastic.messages import LossReason

ONE, TWO = why.RankId(0, 0, "tcp://A0"), why.RankId(5, None, "tcp://B0")
GONE = why.Lost(ONE, LossReason.WORKER_GONE)
STALLED = why.Lost(ONE, LossReason.STALLED, seconds=20.0)
RAISED = why.Lost(TWO, LossReason.RAISED, "ValueError: x")


def test_the_history_names_lines_and_no_rank() -> None:
    lines = {"executing": "In [3], line 4, in train", "raised": "In [3], line 9, in train"}
    assert history_detail(GONE) == "its worker left the cluster"
    assert history_detail(STALLED, executing=lines["executing"]) == (
        "held up the others for 20 s (stall_timeout); it was executing In [3], line 4, in train"
    )
    assert history_detail(RAISED, **lines) == "ValueError: x; raised at In [3], line 9, in train"
    assert history_detail(None) == ""


@pytest.mark.parametrize(
    ("redone", "words"),
    [
        ((0, 0), "noticed 0.0, stepped 7.5 ms"),
        ((1, 0), "noticed 0.0, stepped 7.5 ms; 1 batch redone"),
        ((3, 1200), "noticed 0.0, stepped 7.5 ms; 3 batches of 1,200 samples redone"),
    ],
)
def test_a_reset_has_its_phases_and_the_repeated_work(redone: tuple[int, int], words: str) -> None:
    counts = dict(zip(("batches", "samples"), map(float, redone), strict=True))
    assert reset_detail({"noticed": 0.0, "stepped": 7.5, **counts}) == words


def test_a_straggler_has_its_figures() -> None:
    figures = {"times": 3.04, "micro_batches": 1.0, "before": 4.0, "of": 16.0}
    assert straggler_detail(figures) == (
        "takes 3.0 times as long for a micro-batch as the others; computes 1 of 16 now, 4 before"
    )
