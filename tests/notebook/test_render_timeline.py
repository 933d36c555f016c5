from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ET

import pytest

from nbelastic.notebook.render import Picture, timeline, timeline_key
from nbelastic.notebook.render.timeline import MARKS, legend, thin

from .fakes import STARTED, event, job_status

STORY = (
    event("joined", 1, size=0, rank=0),
    event("formed", 2, size=4),
    event("lost", 20, size=3, rank=2, detail="<killed>"),
    event("reset", 20.1, size=3, detail="rank 2 lost → 3 ranks"),
    event("left", 30, size=2, rank=1),
    event("finished", 42, size=0),
)


def drawn(picture: Picture) -> ET.Element:
    return ET.fromstring(timeline(picture))


def marks(svg: ET.Element) -> dict[str, list[str]]:
    """The tooltips of each kind of mark."""
    kinds: dict[str, list[str]] = {}
    for path in svg.iter("path"):
        kind = (path.get("class") or "").removeprefix("nbe-")
        if kind in MARKS:
            kinds.setdefault(kind, []).append(path.findtext("title") or "")
    return kinds


def test_each_kind_of_change_has_a_mark_with_a_tooltip():
    found = marks(drawn(Picture(job_status(), STORY, STARTED)))
    assert found == {
        "joined": ["join of rank 0, 0:01"],
        "lost": ["loss of rank 2: <killed>, 0:20"],
        "left": ["leave of rank 1, 0:30"],
        "reset": ["reset: rank 2 lost → 3 ranks, 0:20"],
    }


def test_marks_differ_in_shape_and_not_only_in_colour():
    assert len({shape for _, shape in MARKS.values()}) == len(MARKS)


def test_the_summary_says_what_the_drawing_shows():
    svg = drawn(Picture(job_status(), STORY, STARTED))
    assert svg.get("role") == "img"
    assert svg.get("aria-label") == (
        "World size over 0:42: 2 at last, at most 4 ranks; 1 loss, 1 leave, 1 join, 1 reset"
    )


def test_the_line_steps_to_each_size_at_its_time():
    svg = drawn(Picture(job_status(max_np=4, elapsed=40.0), STORY[:4], STARTED))
    (line,) = [p.get("d") or "" for p in svg.iter("path") if p.get("class") == "nbe-step"]
    # 674 wide from 34 on for 40 s, 92 high under 16 for 4 ranks
    assert line == "M34 108V108H67.7V16H371V39H708"


def test_the_size_stays_what_it_was_when_the_job_ends():
    svg = drawn(Picture(job_status(state="finished"), STORY, STARTED))
    (line,) = [p.get("d") or "" for p in svg.iter("path") if p.get("class") == "nbe-step"]
    assert line.endswith("V85H708")  # 2 of 8 ranks


def test_throughput_is_under_the_sizes():
    pace = ((1.0, 100.0), (20.0, 2000.0), (40.0, 1000.0))
    with_pace = timeline(Picture(job_status(), STORY, STARTED, pace=pace))
    assert "samples/s, at most 2,000" in with_pace
    assert "samples/s" not in timeline(Picture(job_status(), STORY, STARTED))


@pytest.mark.parametrize("detail", ["killed", "<" * 200, "rank 3 → 'gone' & \"lost\""])
def test_ten_thousand_events_stay_under_twenty_kilobytes(detail):
    chance = random.Random(1)
    kinds = [*MARKS, "formed", "cooldown"]
    history = [
        event(chance.choice(kinds), i * 0.3, size=chance.randint(0, 200), rank=3, detail=detail)
        for i in range(10_000)
    ]
    pace = [(float(i), chance.random() * 1e6) for i in range(3_000)]
    picture = Picture(job_status(elapsed=3_000.0), history, STARTED, pace=pace)
    source = timeline(picture)
    assert len(source.encode()) < 20_000
    found = marks(ET.fromstring(source))
    assert set(found) == set(MARKS)
    assert sum(len(tips) for tips in found.values()) >= 10
    assert re.search(r"[\d,]+ losses, ", " ".join(found["lost"]))


def test_a_thinned_line_keeps_its_lowest_and_highest_size():
    history = [event("formed", i * 0.1, size=50) for i in range(1, 5_000)]
    history[2_000] = event("lost", 200.1, size=3)
    history[3_000] = event("reset", 300.1, size=99)
    svg = drawn(Picture(job_status(elapsed=500.0, max_np=None), history, STARTED))
    (line,) = [p.get("d") or "" for p in svg.iter("path") if p.get("class") == "nbe-step"]
    heights = [float(y) for y in re.findall(r"V([\d.]+)", line)]
    assert min(heights) == 16.0  # 99 ranks are the top
    assert 105.2 in heights  # 3 ranks


def test_thinning_keeps_the_extremes_in_order():
    points = [(float(i), float(i % 7)) for i in range(1_000)]
    points[500] = (500.0, 100.0)
    points[501] = (501.0, -100.0)
    kept = thin(points, 20)
    assert len(kept) <= 40
    assert (500.0, 100.0) in kept and (501.0, -100.0) in kept
    assert kept == sorted(kept)


def test_the_legend_counts_what_there_is_and_leaves_out_what_there_is_not():
    words = re.findall(r"</svg>([^<]+)<", legend(Picture(job_status(), STORY, STARTED)))
    assert words == ["1 loss", "1 leave", "1 join", "1 reset"]
    assert legend(Picture(job_status())) == ""


def test_a_timeline_is_due_again_when_something_happened_or_time_has_passed():
    key = timeline_key(Picture(job_status(elapsed=42.1), STORY, STARTED))
    assert timeline_key(Picture(job_status(elapsed=42.9), STORY, STARTED)) == key
    assert timeline_key(Picture(job_status(elapsed=43.1), STORY, STARTED)) != key
    assert timeline_key(Picture(job_status(elapsed=42.1), STORY[:-1], STARTED)) != key
    hours = timeline_key(Picture(job_status(elapsed=36_000.0), STORY, STARTED))
    assert timeline_key(Picture(job_status(elapsed=36_100.0), STORY, STARTED)) == hours


def test_events_before_the_start_or_after_the_end_stay_inside():
    history = [event("formed", -5, size=2), event("lost", 500, size=1), event("reset", 501, size=1)]
    svg = drawn(Picture(job_status(elapsed=10.0), history, STARTED))
    starts = [re.match(r"M([\d.]+)", p.get("d") or "") for p in svg.iter("path")]
    assert all(34 <= float(m[1]) <= 708 for m in starts if m)
