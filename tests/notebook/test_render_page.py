from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET

import pytest

from nbelastic.render import PARTS, STYLE, JobSnapshot, page
from nbelastic.render.page import _COLOURS, SYMBOLS
from nbelastic.render.text import ENDED, HAPPENED
from nbelastic.status import DataStatus, Progress, RankStatus

from .fakes import STARTED, FakeJob, event, full, job_status, rank_status


class Page:
    """A page, whose elements nest."""

    def __init__(self, source: str) -> None:
        root = ET.fromstring(f"<root>{source}</root>")
        self.elements = [*root.iter()]
        for style in root.iter("style"):
            style.text = ""
        self.text = " ".join(" ".join(root.itertext()).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [each.attrib for each in self.elements if each.tag == tag]


@pytest.mark.parametrize("state", sorted(SYMBOLS))
def test_every_state_has_a_well_formed_page_with_word_and_symbol(state):
    warnings = ("ranks <never> met\nwrap it", "second")
    source = page(full(state=state, reason="because", warnings=warnings))
    shown = Page(source)
    assert "Warning: ranks <never> met wrap it Warning: second" in shown.text
    badge = re.search(rf'nbe-badge nbe-{state}"><i aria-hidden="true">(.)</i> {state}<', source)
    assert badge and not badge[1].isascii()
    assert state in shown.text


def test_the_page_needs_no_script_and_nothing_from_elsewhere():
    source = page(full())
    assert "<script" not in source and "javascript:" not in source
    assert not re.search(r"(src|href|@import|url\()", source)
    assert not any(name.startswith("on") for each in Page(source).elements for name in each.attrib)


def test_the_page_can_be_read_by_a_screen_reader():
    shown = Page(page(full()))
    assert len(shown.all("caption")) == 1
    assert [cell["scope"] for cell in shown.all("th")] == ["col"] * 6 + ["row"] * 5
    assert "Ranks: 4 running" in shown.text
    assert "lost at 0:20" in shown.text  # rank 3's worker, which may come back
    assert shown.text.count("its worker was killed") == 1 + 1  # a tooltip of the drawing
    (bar,) = shown.all("progress")
    assert bar["value"] == "0.3750" and bar["max"] == "1" and bar["aria-label"]
    assert "38% epoch 2 of 4, batch 5 of 10 · 1:15 left" in shown.text
    drawings = [svg for svg in shown.all("svg") if "role" in svg]
    assert [svg["role"] for svg in drawings] == ["img", "img"]
    assert "1 rank lost" in (drawings[0]["aria-label"] or "")
    assert "loss: 0.5 at step 1, 2 values" in (drawings[1]["aria-label"] or "")
    (line,) = Page(PARTS["live"](full())).all("p")
    assert line["aria-live"] == "polite" and line["role"] == "status"


def rank(number: int | None, **changes) -> RankStatus:
    return dataclasses.replace(rank_status(number), **changes)


SLOW_PACE = {"samples_per_s": None, "steps_per_s": 2.5}
MANY = tuple(rank_status(i) for i in range(198)) + (rank_status(None, state="starting"),) * 2
ENDED_EARLY = (
    event("formed", 2, size=4), event("refused", 3, size=0), event("stopped", 9, size=0)
)  # fmt: skip
RESETS = tuple(event("reset", at, detail=f"cause {at}") for at in range(12))
FALLING = [(float(step), 2.0 / (1 + step) ** 2) for step in range(50)]
NAN, INF = float("nan"), float("inf")
ROWS = (DataStatus("Parquet", 1, 960, 40, 1960, 48, 0), DataStatus("Shards", 0, 1, None, 1, 0, 0))
REASON = "ValueError: no\n" + "\n".join(f"line {i}" for i in range(50))
DIVIDED = (
    *(rank(i, micro_batches=(4 * i, 4 * i + 4)) for i in (0, 1)),
    rank(2, micro_batches=(8, 8)),
    rank_status(3),
)


@pytest.mark.parametrize(
    ("part", "facts", "says"),
    [
        ("head", {"state": "finished", "errors": 1},
         {'nbe-stopped"><i aria-hidden="true">⚠</i> finished with 1 error<': 1}),
        ("head", {"state": "stopped", "size": 0, "history": ENDED_EARLY},
         {"<dd>4 <small>at the end</small></dd>": 1}),
        ("head", {"state": "failed", "reason": REASON},
         {"ValueError: no": 1, "line 6\n": 1, "line 49": 1, "more lines": 1}),
        ("head", {"samples_per_s": None, "ranks": (rank(0, **SLOW_PACE),)},
         {"<dt>steps/s</dt><dd>2.5</dd>": 1}),
        ("ranks", {"samples_per_s": None, "ranks": (rank(0, **SLOW_PACE),)},
         {">Steps/s<": 1, "Samples/s": 0, ">2.5<": 1}),
        ("progress", {"progress": Progress(0, 0, step=1500, steps=6000, remaining_s=90.0)},
         {'value="0.2500"': 1, "step 1,500 of 6,000": 1, "1:30 left": 1, "epoch": 0}),
        ("data", {"data": ROWS},
         {"Parquet: 960 rows of epoch 2 done, 40 left, 48 redone, 0 lost": 1,
          "Shards: 1 row of epoch 1 done, 0 redone, 0 lost": 1}),
        ("data", {"data": ROWS[:1], "state": "finished"},
         {"1,960 rows once, 48 redone, 0 lost": 1}),
        ("curves", {"curves": {f"m{i}": [(0.0, 1.0)] for i in range(9)}},
         {"<svg": 6, "+ 3 more metrics": 1}),
        ("curves", {"curves": {"a": [(0, 1.0), (1, NAN), (2, INF), (3, 2.0)], "b": [(0, NAN)],
                               "c": []}},
         {"<svg": 2, "Mnan": 0, "nanL": 0, 'nan"': 0, "inf": 0}),
        ("curves", {"curves": {"loss": FALLING, "one": [(0, 1.0)]}},
         {"<small>0.0008 to 2, log</small>": 1,  # else all but its start is a flat line
          "<title>step 49: 0.0008</title>": 1, "<small></small>": 1}),
        ("ranks", {"ranks": (rank(0, resident_bytes=1_234_000_000),
                             rank(1, gpu_bytes=3_100_000_000, gpu_total=80_000_000_000))},
         {">Samples/s<": 1, ">Memory<": 1, ">GPU memory<": 1, ">1.2 GB<": 1, ">3.1 of 80 GB<": 1}),
        ("ranks", {"ranks": MANY},
         {'<th scope="row"': 20, "+ 180 more": 1, "Ranks: 198 running, 2 starting": 1,
          "emory": 0}),
        ("ranks", {"backend": "shm"}, {"4 running, over shared memory<": 1, "icro-batch": 0}),
        ("ranks", {"ranks": (rank(0, name="gpu-3"), rank_status(1))},
         {'title="tcp://10.0.0.0:40000">worker gpu-3</td>': 1, ">10.0.0.1:40001</td>": 1}),
        ("ranks", {"ranks": (rank(0, name="gpu-3"), rank_status(4))}, {"on 10.0.0.0<": 1}),
        ("ranks", {"ranks": DIVIDED, "micro_batches": 8},
         {"8 micro-batches a step, exact</span></caption>": 1, ">4 (0 to 3)</td>": 1,
          ">4 (4 to 7)</td>": 1, ">none</td>": 1, 'data-label="Micro-batches">–</td>': 1}),
        ("ranks", {"ranks": DIVIDED, "micro_batches": 8, "why_not_exact": "rank <2> differs"},
         {"not exact: rank &lt;2&gt; differs": 1}),
        ("changes", {"history": RESETS},
         {"cause ": 6, "cause 6<": 1, "cause 11<": 1, "+ 6 more": 1, "<details": 1}),
    ],
)  # fmt: skip
def test_a_part_says_what_there_is_to_say(part, facts, says):
    """How often each text is there."""
    known = dict(facts)
    history, curves = known.pop("history", ()), known.pop("curves", {})
    snapshot = JobSnapshot(job_status(**known), history, STARTED, curves)
    assert Page(page(snapshot)).text
    source = PARTS[part](snapshot)
    assert {words: source.count(words) for words in says} == says


def test_every_announced_event_is_said_and_everything_foreign_is_escaped():
    evil = '</text></title></pre><script>alert("1")</script><img src=x onerror="a(2)">\x00\x1b'
    rank = dataclasses.replace(rank_status(0), worker=evil, host=evil, state=evil, device=evil)
    said = dict(joined="Rank 1 has joined", lost="Rank 1 is lost", left="Rank 1 has left")
    said |= {kind: f"The job has {kind}" for kind in ENDED} | HAPPENED
    said |= {"stopped": "The job has been stopped"}
    for kind, words in said.items():
        news = event(kind, 1, rank=1, detail=evil, size=2)
        history = [dataclasses.replace(news, worker=evil, time=STARTED + at) for at in (1, 2)]
        state = kind if kind in ENDED else "waiting"
        status = job_status(name=evil, state=state, reason=evil, ranks=(rank,))
        snapshot = JobSnapshot(status, history, STARTED, {evil: [(0, 1)]})
        source = page(snapshot, note=evil) + PARTS["live"](snapshot)
        assert words in source
        shown = Page(source)
        assert shown.all("script") == shown.all("img") == []
        assert "<script" not in source and "\x00" not in source and "\x1b" not in source
        assert "<script>" in shown.text
    for length in range(40, 80):  # what is cut off is not cut within an escape
        source = PARTS["head"](JobSnapshot(job_status(name="&" * length)))
        assert source.count("&") == source.count("&amp;")


COST = {"noticed": 0.0, "restored": 6.0, "synchronised": 25.6, "stepped": 470.0}


def lines(*history, **changes) -> list[str]:
    """Return what the page says has happened, newest first."""
    source = PARTS["changes"](JobSnapshot(job_status(**changes), history, STARTED))
    return re.findall(r"</time> <span>(.*?)</span></li>", source)


LOST = event("lost", 20, rank=2, detail="its worker left the cluster", name="two")
FEWER = event("reset", 20.1, size=3, detail="rank 2 on tcp://…: its worker left → 3 ranks")


@pytest.mark.parametrize(
    ("history", "shown"),
    [
        (  # who was lost, and what it has cost
            (LOST, FEWER, event("formed", 20.2, size=3),
             event("phases", 20.6, figures={**COST, "batches": 3, "samples": 1200})),
            ["Rank 2 on worker two lost: its worker left the cluster → 3 ranks"
             " · training went on after 26 ms, 3 batches (1,200 samples) redone"
             " · the cause: job.why(2)"],
        ),
        (  # a planned change
            (event("joined", 1, size=4, rank=0, name="one"),  # with the start: no change
             event("formed", 1, size=4),
             event("left", 30, size=3, rank=3, name="three", detail="as planned"),
             event("reset", 30, size=4, detail="a planned change → 4 ranks"),
             event("joined", 30, size=4, rank=3, name="four"),
             event("phases", 31, figures={**COST, "batches": 0})),
            ["Rank 3 on worker three left; Rank 3 on worker four joined → 4 ranks"
             " · training went on after 26 ms, no batch redone"],
        ),
        (  # in order, and a loss precedes its reset
            (event("reset", 20, size=3, detail="rank 1: ranks disagree → 3 ranks"),
             event("lost", 25, rank=0, detail="killed", name="zero")),
            ["Rank 0 on worker zero lost: killed · the cause: job.why(0)",
             "rank 1: ranks disagree → 3 ranks"],
        ),
        (  # many at once are counted
            (event("reset", 20, size=9, detail="a planned change → 9 ranks"),
             *(event("joined", 20, size=9, rank=i, name=f"w{i}") for i in range(5))),
            ["Rank 0 on worker w0 joined; Rank 1 on worker w1 joined; Rank 2 on worker w2 joined; "
             "2 more left or joined → 9 ranks"],
        ),
        (  # with advice
            (event("refused", 5, detail="it runs torch 2.1"),
             event("cooldown", 6, detail="worker a is excluded for good"),
             event("cooldown", 7, detail="worker a is excluded for 9.0 s")),
            ["Cooldown: worker a is excluded for 9.0 s",
             "Cooldown: worker a is excluded for good · with blacklist_cooldown=(lo, hi) it may "
             "come back",
             "A worker is not used (10.0.0.1:40001): it runs torch 2.1 · dask elastic doctor "
             "compares what workers have installed"],
        ),
    ],
)  # fmt: skip
def test_changes_say_who_left_and_joined_and_what_it_has_cost(history, shown):
    assert lines(*history) == shown


def test_a_lost_worker_is_shown_until_it_is_back_or_replaced():
    lost = event("lost", 20, rank=1, name="two")
    crew = tuple(rank_status(i) for i in range(3))

    def table(**changes) -> str:
        known = {"ranks": crew, "max_np": 4, "elapsed": 42.0} | changes
        return PARTS["ranks"](JobSnapshot(job_status(**known), (lost,), STARTED))

    assert "lost at 0:20" in table() and "worker two" in table() and "not back yet" in table()
    assert "the cause: job.why(1)" in table()
    assert "not back yet" not in table(max_np=3)
    assert "not back yet" not in table(elapsed=200.0)
    assert "not back yet" not in table(state="stopped")
    back = dataclasses.replace(rank_status(None, state="starting"), name="two")
    assert "not back yet" not in table(ranks=(*crew, back))
    assert "starting again" in table(ranks=(*crew, back))


@pytest.mark.parametrize("column", [1, 2])
def test_words_can_be_read_on_their_background_in_both_schemes(column):
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for ink, least in (("fg", 7), ("muted", 4.5), ("accent", 3), ("good", 3), ("bad", 3)):
        for paper in ("bg", "soft"):
            pair = sorted(light(_COLOURS[name][column]) for name in (ink, paper))
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= least, (ink, paper)


def test_every_rule_is_scoped_to_what_is_ours():
    rules = re.sub(r"@keyframes nbe-\w+\{.*?\}\s*\}", "", STYLE.replace("<style>", ""), flags=re.S)
    rules = re.sub(r"@(?:media|container)[^{]*\{(.*?\})\s*\}", r"\1", rules, flags=re.S)
    selectors = [s for group in re.findall(r"([^{}]+)\{", rules) for s in group.split(",")]
    assert len(selectors) > 40
    assert [s for s in selectors if ".nbe" not in s] == []


def test_the_last_lines_of_rank_0_are_folded_into_the_page():
    job = FakeJob()
    job.prints("".join(f"line {i}\n" for i in range(100)) + "\r10%\r20%")
    job.prints("not this\n", rank=1)
    source = page(JobSnapshot.of(job))
    assert "<details><summary>The last lines of rank 0" in source
    assert "line 99\n20%" in source and "line 80\n" not in source and "not this" not in source
    job.end("failed", reason="start 1 on tcp://10.0.0.1:1: ValueError: no")
    assert "at line 3 of the cell" in page(JobSnapshot.of(job))  # as its result raises it
