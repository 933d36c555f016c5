"""fit(timeline=...): what all ranks did, in one file."""

import json
from pathlib import Path

import pytest

import nbelastic
from nbelastic.errors import OptionError
from tests.support.clusters import kinds
from tests.support.training import Fault, Workload, check


def test_a_timeline_has_a_row_for_each_rank_and_spans_resets(crew, tmp_path):
    path = tmp_path / "timeline.json"
    work = Workload(
        tmp_path, epochs=1000, until_newcomers=1, faults=(Fault(rank=1, epoch=2, batch=2),)
    )
    job = crew.fit(work, np=3, min_np=2, timeline=path)
    check(job.results(), work)
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert rows == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    ended = max(event["ts"] for event in events if event["ph"] == "X")
    of_rank_0 = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    names = [event["name"] for event in of_rank_0]
    assert {"REDUCE_GRADIENTS", "COMMIT", "STATE_TRANSFER"} <= {*names}
    assert len([e for e in events if e["name"] == "RESET"]) >= 2 + 2 + 3
    first_reset = min(e["ts"] for e in events if e["name"] == "RESET")
    assert first_reset < ended
    assert [each.name for each in tmp_path.glob("timeline.json*")] == ["timeline.json"]


def test_ranks_that_do_not_see_the_path_do_not_fail(crew, tmp_path):
    def hide():
        for path in Path(tmp_path).glob("sub"):
            path.rename(tmp_path / "hidden")

    (tmp_path / "sub").mkdir()
    job = crew.fit(hide, np=1, timeline=tmp_path / "sub" / "t.json")
    assert kinds(job).count("warning") == 1
    assert "there is no timeline at" in next(e.detail for e in job.history if e.kind == "warning")


@pytest.mark.parametrize("value", [3, "", "/no/such/directory/t.json", "/"])
def test_a_path_that_cannot_be_is_refused(value):
    with pytest.raises(OptionError, match="must be a path in a directory that exists"):
        nbelastic.fit(print, timeline=value)
