from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ET

import pytest

from nbelastic.render import JobSnapshot
from nbelastic.render.timeline import MARKS, legend, thin, timeline

from .fakes import STARTED, event, job_status

STORY = (
    event("joined", 1, size=0, rank=0),
    event("refused", 1.5, size=0),
    event("formed", 2, size=4),
    event("joined", 10, size=4, rank=3),
    event("refused", 12, size=0),
    event("lost", 20, size=3, rank=2, detail="<killed>"),
    event("reset", 20.1, size=3, detail="rank 2 lost → 3 ranks"),
    event("left", 30, size=2, rank=1),
    event("finished", 42, size=0),
)


def marks(svg: ET.Element) -> dict[str, list[str]]:
    """The tooltips of each kind of mark."""
    kinds: dict[str, list[str]] = {}
    for path in svg.iter("path"):
        kind = (path.get("class") or "").removeprefix("nbe-")
        if kind in MARKS:
            kinds.setdefault(kind, []).append(path.findtext("title") or "")
    return kinds


def test_each_kind_of_change_has_a_mark_with_a_tooltip_and_the_summary_counts_it():
    svg = ET.fromstring(timeline(JobSnapshot(job_status(), STORY, STARTED)))
    assert marks(svg) == {
        "joined": ["rank 3 on 10.0.0.1:40001 joined, 0:10"],  # not those of the first generation
        "lost": ["rank 2 on 10.0.0.1:40001 lost: <killed>, 0:20"],
        "left": ["rank 1 on 10.0.0.1:40001 left, 0:30"],
    }
    assert svg.get("role") == "img"
    assert svg.get("width") == "100%" and int(svg.get("height") or 0) < 200
    assert svg.get("viewBox") is None  # nothing is scaled: its text stays as large as it is
    assert svg.get("aria-label") == (
        "World size over 0:40: 2 at last, at most 4 ranks; 1 rank lost, 1 leave, 1 join"
    )
    shown = legend(JobSnapshot(job_status(), STORY, STARTED))
    assert 'width="12" height="12"' in shown  # also without a style
    assert re.findall(r"</svg>([^<]+)<", shown) == ["1 rank lost", "1 leave", "1 join"]
    assert legend(JobSnapshot(job_status())) == ""


def steps(snapshot: JobSnapshot) -> str:
    """The line of the world size, as a path."""
    paths = ET.fromstring(timeline(snapshot)).iter("path")
    (line,) = [path.get("d") or "" for path in paths if path.get("class") == "nbe-step"]
    return line


def test_the_line_steps_to_each_size_at_its_time():
    line = steps(JobSnapshot(job_status(max_np=4, elapsed=42.0), STORY[:7], STARTED))
    # 1000 wide for 40 s since the first generation, 88 high under 22 for 4 ranks
    assert line == "M0 110H0V110H0V22H450V44H1000"
    ended = steps(JobSnapshot(job_status(state="finished"), STORY, STARTED))
    assert ended.endswith("V88H1000")  # the last size stays: 2 of 8 ranks


def test_throughput_is_under_the_sizes():
    pace = ((1.0, 100.0), (20.0, 2000.0), (40.0, 1000.0))
    with_pace = timeline(JobSnapshot(job_status(), STORY, STARTED, pace=pace))
    assert 'samples/s<tspan class="nbe-wide">, max 2,000</tspan>' in with_pace
    assert "samples/s" not in timeline(JobSnapshot(job_status(), STORY, STARTED))
    spiked = (*((float(i), 100.0) for i in range(200)), (201.0, 1e6))
    drawing = timeline(JobSnapshot(job_status(elapsed=300.0), STORY, STARTED, pace=spiked))
    assert ", 99% below 100<" in drawing  # one spike does not flatten the rest
    kept = thin([(float(i), float(i % 7) + 100 * (i == 500)) for i in range(1_000)], 20)
    assert len(kept) <= 60 and (500.0, 103.0) in kept and kept[-1][0] == 999.0
    assert kept == sorted(kept)


@pytest.mark.parametrize("detail", ["killed", "<" * 200, "rank 3 → 'gone' & \"lost\""])
def test_ten_thousand_events_stay_under_twenty_kilobytes(detail):
    chance = random.Random(1)
    kinds = [*MARKS, "formed", "cooldown"]
    history = [
        event(chance.choice(kinds), i * 0.3, size=chance.randint(0, 200), rank=3, detail=detail)
        for i in range(10_000)
    ]
    pace = [(float(i), chance.random() * 1e6) for i in range(3_000)]
    snapshot = JobSnapshot(job_status(elapsed=3_000.0), history, STARTED, pace=pace)
    source = timeline(snapshot)
    assert len(source.encode()) < 20_000
    found = marks(ET.fromstring(source))
    assert set(found) == set(MARKS)
    assert sum(len(tips) for tips in found.values()) >= 10
    assert re.search(r"[\d,]+ ranks lost, ", " ".join(found["lost"]))


def test_events_before_the_start_or_after_the_end_stay_inside():
    history = [
        event("formed", -5, size=2),
        event("joined", -4, size=2),
        event("lost", 500, size=1),
        event("reset", 501, size=1),
    ]
    svg = ET.fromstring(timeline(JobSnapshot(job_status(elapsed=10.0), history, STARTED)))
    lines = " ".join(p.get("d") or "" for p in svg.iter("path") if p.get("class") == "nbe-step")
    assert all(0 <= float(x) <= 1000 for x in re.findall(r"[MH]([-\d.]+)", lines))
    places = [float((each.get("x") or "").rstrip("%")) for each in svg.iter("svg") if each.get("x")]
    assert places and all(0 <= place <= 100 for place in places)


@pytest.mark.parametrize("elapsed", [1.0, 9.0, 61.0, 1_000.0, 50_000.0, 900_000.0, 1e8])
def test_times_under_the_drawing_do_not_touch_where_it_is_narrow(elapsed):
    source = timeline(JobSnapshot(job_status(elapsed=elapsed), STORY[:2], STARTED))
    assert 1 <= len(re.findall(r'<text fill="currentColor" x="[\d.]+%"', source)) <= 5
