"""Timelines: events of one process, parts of a job's ranks, and the file for Perfetto."""

import json

import pytest

from nbelastic.elastic.ranks import timeline as timelines
from nbelastic.elastic.ranks.context import activate
from nbelastic.elastic.ranks.timeline import Timeline, join_parts, part_of
from tests.support.world import world_of


def events_in(path):
    return json.loads(path.read_text())["traceEvents"]


def test_parts_of_ranks_become_one_file_with_a_row_for_each(tmp_path, monkeypatch):
    monkeypatch.setattr(timelines, "APPEND_AFTER", -1.0)
    path = tmp_path / "a [1].json"
    for start in range(3):
        timeline = Timeline()
        timeline.record(part_of(str(path), "run", start), start, marks_cycles=start == 0)
        with timeline.span("COMMIT"):
            pass
        if start < 2:  # the third rank is killed
            timeline.close_part()
            timeline.instant("after the end")
    with open(part_of(str(path), "run", 2), "a") as part:
        part.write('{"name": "half')
    other = tmp_path / "a [1].json.other-0"
    other.write_text("of another job\n")

    assert join_parts(str(path), "run")
    events = events_in(path)
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["rank 0", "rank 1", "rank 2"]
    assert [(e["name"], e["pid"]) for e in events[3:]] == [("COMMIT", rank) for rank in range(3)]
    assert sorted(tmp_path.iterdir()) == [path, other]
    assert not join_parts(str(path), "run")
    timeline.close_part()


def test_an_event_has_the_rank_of_its_time_and_a_part_that_cannot_be_written_is_not_begun(tmp_path):
    timeline = Timeline()
    with pytest.raises(OSError, match="nowhere"):
        timeline.record(tmp_path / "nowhere" / "part", 0, marks_cycles=False)
    assert not timeline.is_on
    timeline.record(tmp_path / "part", 0, marks_cycles=False)
    for rank in (0, 5):
        with activate(world_of(rank, 6)):
            timeline.instant("moment")
    timeline.close_part()
    lines = (tmp_path / "part").read_text().splitlines()
    assert [json.loads(line)["pid"] for line in lines] == [0, 5]
