from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from nbelastic import messages as reasons
from nbelastic.driver.status import DataStatus, Progress
from nbelastic.render import PARTS, STYLE, JobSnapshot, page, rank_line
from nbelastic.render.theme import _COLOURS, SYMBOLS

from .fakes import STARTED, FakeJob, event, job_status, rank_status

VOID = {"br", "hr", "img", "input", "meta"}


class Page(HTMLParser):
    """Reads a page, and fails where its elements do not nest."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.seen if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def full(**changes) -> JobSnapshot:
    history = (
        event("joined", 1, size=0, rank=0),
        event("formed", 2, size=4),
        event("lost", 20, size=3, rank=3, detail="its worker was killed", name="w3"),
        event("reset", 20.1, size=3, detail="rank 3 lost → 3 ranks"),
    )
    progress = Progress(1, 4, 5, 10, remaining_s=75.0)
    return JobSnapshot(
        job_status(progress=progress, **changes),
        history,
        STARTED,
        {"loss": [(0.0, 2.0), (1.0, 0.5)]},
        ((1.0, 100.0), (2.0, 200.0)),
    )


@pytest.mark.parametrize("state", sorted(SYMBOLS))
def test_every_state_has_a_well_formed_page_with_word_and_symbol(state):
    source = page(full(state=state, reason="because"))
    shown = Page(source)
    badge = re.search(rf'nbe-badge nbe-{state}"><i aria-hidden="true">(.)</i> {state}<', source)
    assert badge and not badge[1].isascii()
    assert state in shown.text


def test_a_job_that_has_survived_an_error_is_not_green():
    assert 'nbe-stopped"><i aria-hidden="true">⚠</i> finished with 1 error<' in page(
        full(state="finished", errors=1)
    )


@pytest.mark.parametrize("state", ["running", "finished"])
def test_warnings_are_on_the_page_with_what_to_do(state):
    shown = Page(page(full(state=state, warnings=("ranks <never> met\nwrap it", "second"))))
    assert "Warning: ranks <never> met wrap it Warning: second" in shown.text


def test_a_worker_that_leaves_is_on_the_page_with_its_time():
    notice = reasons.Notice(reasons.NoticeSource.AWS, "terminate", 114.2, "w3")
    words = str(reasons.Noticed((notice,), 1))
    shown = Page(page(full(state="running", reason=words)))
    assert "worker w3 leaves in 1:54: AWS spot (terminate)" in shown.text


def test_the_page_needs_no_script_and_nothing_from_elsewhere():
    source = page(full())
    assert "<script" not in source and "javascript:" not in source
    assert not re.search(r"(src|href|@import|url\()", source)
    assert not any(name.startswith("on") for _, attrs in Page(source).seen for name in attrs)


def test_the_table_of_ranks_can_be_read_by_a_screen_reader():
    shown = Page(page(full()))
    assert len(shown.all("caption")) == 1
    assert [cell["scope"] for cell in shown.all("th")] == ["col"] * 6 + ["row"] * 5
    assert "Ranks: 4 running" in shown.text
    assert "lost at 0:20" in shown.text  # rank 3's worker, which may come back


def test_the_memory_of_ranks_has_columns_where_it_is_known():
    assert "emory" not in page(full())
    known = dataclasses.replace(rank_status(0), resident_bytes=1_234_000_000)
    on_gpu = dataclasses.replace(rank_status(1), gpu_bytes=3_100_000_000, gpu_total=80_000_000_000)
    text = Page(page(full(ranks=(known, on_gpu)))).text
    assert "Samples/s Memory GPU memory Device" in text
    assert "250 1.2 GB – cuda:0" in text and "250 – 3.1 of 80 GB cuda:0" in text
    assert rank_line(known).split()[2:] == ["10", "commits", "1.2", "GB", known.worker]


def test_progress_is_a_labelled_element_with_the_remaining_time():
    shown = Page(page(full()))
    (bar,) = shown.all("progress")
    assert bar["value"] == "0.3750" and bar["max"] == "1" and bar["aria-label"]
    assert "38%" in shown.text and "epoch 2 of 4, batch 5 of 10" in shown.text
    assert "1:15 left" in shown.text


def test_progress_of_a_loop_without_epochs_is_in_steps():
    progress = Progress(epoch=0, epochs=0, step=1500, steps=6000, remaining_s=90.0)
    shown = PARTS["progress"](JobSnapshot(job_status(progress=progress)))
    assert 'value="0.2500"' in shown
    assert "step 1,500 of 6,000" in shown and "epoch" not in shown and "1:30 left" in shown


def test_a_pace_without_samples_is_in_steps():
    ranks = tuple(
        dataclasses.replace(rank_status(i), samples_per_s=None, steps_per_s=2.5) for i in range(2)
    )
    snapshot = JobSnapshot(job_status(ranks=ranks, samples_per_s=None))
    assert "<dt>steps/s</dt><dd>2.5</dd>" in PARTS["head"](snapshot)
    table = PARTS["ranks"](snapshot)
    assert "Steps/s" in table and "Samples/s" not in table and table.count(">2.5<") == 2


def test_drawings_have_a_role_and_a_summary():
    drawings = [svg for svg in Page(page(full())).all("svg") if "role" in svg]
    assert [svg["role"] for svg in drawings] == ["img", "img"]
    assert "1 rank lost" in (drawings[0]["aria-label"] or "")
    assert "loss: 0.5 at step 1, 2 values" in (drawings[1]["aria-label"] or "")


def test_what_happened_last_is_said_politely():
    source = PARTS["live"](full())
    (line,) = Page(source).all("p")
    assert line["aria-live"] == "polite" and line["role"] == "status"
    assert "Reset: rank 3 lost → 3 ranks" in source


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("joined", "Rank 2 has joined"),
        ("lost", "Rank 2 is lost"),
        ("left", "Rank 2 has left"),
        ("finished", "The job has finished"),
        ("failed", "The job has failed"),
        ("stopped", "The job has been stopped"),
        ("refused", "A worker is not used"),
        ("restarted", "The job starts over"),
        ("cooldown", "Cooldown"),
        ("share", "Share of the cluster"),
        ("backend", "Backend"),
    ],
)
def test_joins_losses_leaves_and_ends_are_said(kind, said):
    snapshot = JobSnapshot(job_status(), (event(kind, 1, rank=2), event("formed", 2)), STARTED)
    assert said in PARTS["live"](snapshot)


def test_everything_foreign_is_escaped():
    evil = '<script>alert("1")</script>\x00\x1b'
    rank = dataclasses.replace(rank_status(0), worker=evil, host=evil, state=evil, device=evil)
    history = [event(kind, 1, detail=evil, size=1) for kind in ("lost", "reset", "failed")]
    for state in ("running", "failed", "waiting"):
        status = job_status(name=evil, state=state, reason=evil, ranks=(rank,))
        source = page(JobSnapshot(status, history, STARTED, {evil: [(0, 1)]}), note=evil)
        shown = Page(source)
        assert shown.all("script") == []
        assert "<script" not in source and "\x00" not in source and "\x1b" not in source
        assert "<script>" in shown.text


def test_many_ranks_are_cut_to_twenty_rows_and_counted():
    ranks = tuple(rank_status(i) for i in range(198)) + (rank_status(None, state="starting"),) * 2
    source = PARTS["ranks"](JobSnapshot(job_status(ranks=ranks)))
    assert source.count('<tr role="row"') == 21
    assert "+ 180 more" in source
    assert "Ranks: 198 running, 2 starting" in source


@pytest.mark.parametrize(
    ("backend", "said"),
    [("shm", "4 running, over shared memory<"), ("", "4 running<"), ("<b>", "over &lt;b&gt;<")],
)
def test_the_table_of_ranks_says_what_tensors_travel_over(backend, said):
    assert said in PARTS["ranks"](JobSnapshot(job_status(backend=backend)))


def test_many_changes_are_cut_to_the_last_six():
    history = [event("reset", at, detail=f"cause {at}") for at in range(12)]
    source = PARTS["changes"](JobSnapshot(job_status(), history, STARTED))
    assert re.findall(r"cause (\d+)", source) == ["11", "10", "9", "8", "7", "6"]
    assert "+ 6 more" in source and Page(source).all("details")


COST = {"noticed": 0.0, "restored": 6.0, "synchronised": 25.6, "stepped": 470.0}


def lines(*history, **changes) -> list[str]:
    """Return what the page says has happened, newest first."""
    source = PARTS["changes"](JobSnapshot(job_status(**changes), history, STARTED))
    return re.findall(r"</time> <span>(.*?)</span></li>", source)


def test_a_failure_says_who_was_lost_and_what_it_has_cost():
    lost = event("lost", 20, rank=2, detail="its worker left the cluster", name="two")
    reset = event("reset", 20.1, size=3, detail="rank 2 on tcp://…: its worker left → 3 ranks")
    cost = event("phases", 20.6, figures={**COST, "batches": 3, "samples": 1200})
    assert lines(lost, reset, event("formed", 20.2, size=3), cost) == [
        "Rank 2 on worker two lost: its worker left the cluster → 3 ranks"
        " · training went on after 26 ms, 3 batches (1,200 samples) redone"
        " · the cause: job.why(2)"
    ]
    cost = event("phases", 20.6, figures={**COST, "batches": 0, "samples": 0})
    assert "after 26 ms, no batch redone ·" in lines(lost, reset, cost)[0]


@pytest.mark.parametrize(
    ("kind", "detail", "says"),
    [
        ("refused", "it runs torch 2.1", "dask elastic doctor compares"),
        ("cooldown", "worker a is excluded for good", "blacklist_cooldown=(lo, hi)"),
        ("cooldown", "worker a is excluded for 9.0 s", "excluded for 9.0 s"),
    ],
)
def test_advice_stands_beside_what_does_not_train(kind, detail, says):
    (line,) = lines(event(kind, 5, detail=detail))
    assert says in line and ("·" in line) == (says not in detail)


def test_a_planned_change_says_who_joined_and_who_left():
    assert lines(
        event("joined", 1, size=4, rank=0, name="one"),  # with the start: no change
        event("formed", 1, size=4),
        event("left", 30, size=3, rank=3, name="three", detail="as planned"),
        event("reset", 30, size=4, detail="a planned change → 4 ranks"),
        event("joined", 30, size=4, rank=3, name="four"),
        event("phases", 31, figures={"noticed": 0.0, "synchronised": 4.0}),
    ) == [
        "Rank 3 on worker three left; Rank 3 on worker four joined → 4 ranks"
        " · training went on after 4 ms"
    ]


def test_a_straggler_is_named():
    slow = event("straggler", 9, rank=3, name="three", detail="takes 3.0 times as long as others")
    assert lines(slow) == ["Rank 3 on worker three takes 3.0 times as long as others"]
    live = PARTS["live"](JobSnapshot(job_status(), [slow], STARTED))
    assert "0:09 Rank 3 on worker three takes 3.0 times as long" in live


def test_changes_are_in_order_and_a_loss_precedes_its_reset():
    reset = event("reset", 20, size=3, detail="rank 1: ranks disagree → 3 ranks")
    lost = event("lost", 25, rank=0, detail="killed", name="zero")
    assert lines(reset, lost) == [
        "Rank 0 on worker zero lost: killed · the cause: job.why(0)",
        "rank 1: ranks disagree → 3 ranks",
    ]


def test_many_who_join_at_once_are_counted():
    reset = event("reset", 20, size=9, detail="a planned change → 9 ranks")
    joins = [event("joined", 20, size=9, rank=i, name=f"w{i}") for i in range(5)]
    (line,) = lines(reset, *joins)
    assert "worker w2 joined; 2 more left or joined → 9 ranks" in line


def test_each_change_is_told_once_on_a_page():
    shown = Page(page(full())).text
    assert shown.count("its worker was killed") == 1 + 1  # a tooltip of the drawing


def test_a_worker_is_shown_by_name_with_its_address_as_tooltip():
    named = dataclasses.replace(rank_status(0), name="gpu-3")
    source = PARTS["ranks"](JobSnapshot(job_status(ranks=(named, rank_status(1)))))
    assert 'title="tcp://10.0.0.0:40000">worker gpu-3</td>' in source
    assert "<td" in source and ">10.0.0.1:40001</td>" in source


def test_hosts_are_shown_where_there_are_several():
    one, other = rank_status(0), rank_status(4)
    assert "on node-0" not in PARTS["ranks"](JobSnapshot(job_status(ranks=(one,))))
    assert "on node-1" in PARTS["ranks"](JobSnapshot(job_status(ranks=(one, other))))


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


def test_many_metrics_are_cut_to_six():
    curves = {f"m{i}": [(0.0, 1.0)] for i in range(9)}
    source = PARTS["curves"](JobSnapshot(job_status(), curves=curves))
    assert len(Page(source).all("svg")) == 6
    assert "+ 3 more metrics" in source


def test_metrics_that_are_not_finite_are_drawn_as_far_as_they_go():
    nan, inf = float("nan"), float("inf")
    curves = {"a": [(0, 1.0), (1, nan), (2, inf), (3, 2.0)], "b": [(0, nan)], "c": []}
    source = PARTS["curves"](JobSnapshot(job_status(), curves=curves))
    assert len(Page(source).all("svg")) == 2
    assert not re.search(r' d="[^"]*(nan|inf)', source)


def test_a_failure_shows_the_ends_of_its_reason():
    reason = "ValueError: no\n" + "\n".join(f"line {i}" for i in range(50))
    source = page(JobSnapshot(job_status(state="failed", reason=reason)))
    assert "ValueError: no" in source and "line 6\n" in source and "line 49" in source
    assert "more lines" in source


def test_a_waiting_job_says_what_for():
    assert "1 more needed" in page(JobSnapshot(job_status(state="waiting", reason="1 more needed")))


def test_colours_come_from_jupyter_and_fall_back_by_scheme():
    light, dark = STYLE.split("@media (prefers-color-scheme:dark)")
    names = set(re.findall(r"(--nbe-\w+):var\(--jp-[\w-]+,#\w{6}\)", light))
    assert len(names) == 9
    assert set(re.findall(r"(--nbe-\w+):var\(--jp-[\w-]+,#\w{6}\)", dark)) == names
    assert set(re.findall(r"var\((--nbe-\w+)\)", STYLE)) - names == {"--nbe-state"}


def test_text_has_the_colours_that_are_made_for_text():
    inks = set(re.findall(r"[{;]color:var\(--nbe-(\w+)\)", STYLE))
    assert inks == {"fg", "muted", "state"}, "that of the state is its symbol's"


@pytest.mark.parametrize("what", ["worker", "host", "metric", "job"])
def test_long_names_that_differ_at_their_ends_look_different(what):
    def source(end: str) -> str:
        name = f"dask-jobqueue-SLURMCluster-gpu-node0123-17-of-128-validation-{end}"
        first = dataclasses.replace(rank_status(0), **{"worker": {"name": name}}.get(what, {}))
        other = rank_status(5)
        if what == "host":
            first = dataclasses.replace(first, host=name)
        status = job_status(ranks=(first, other), **({"name": name} if what == "job" else {}))
        curves = {name: [(0, 1.0), (1, 2.0)]} if what == "metric" else {}
        shown = page(JobSnapshot(status, curves=curves))
        return re.sub(r' (title|aria-label)="[^"]*"|<title>.*?</title>', "", shown)

    assert source("01") != source("02")


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


def test_an_empty_job_has_a_page_too():
    shown = Page(
        page(JobSnapshot(job_status(state="waiting", size=0, ranks=(), samples_per_s=None)))
    )
    assert shown.all("table") == [] and shown.all("progress") == []


def test_the_same_picture_is_always_the_same_page():
    assert page(full()) == page(full())


def test_micro_batches_are_shown_with_each_rank_and_why_they_are_not_exact():
    ranks = [dataclasses.replace(rank_status(r), micro_batches=(4 * r, 4 * r + 4)) for r in (0, 1)]
    late = dataclasses.replace(rank_status(2), micro_batches=(8, 8))
    shown = {"ranks": (*ranks, late, rank_status(3)), "micro_batches": 8}
    found = page(JobSnapshot(job_status(**shown)))
    assert "8 micro-batches a step, exact</span></caption>" in found
    for block in ("4 (0 to 3)", "4 (4 to 7)", "none", "–"):
        assert f'data-label="Micro-batches">{block}</td>' in found
    reason = "rank <2> computes other bits"
    found = page(JobSnapshot(job_status(**shown, why_not_exact=reason)))
    assert "not exact: rank &lt;2&gt; computes other bits" in found
    assert "Micro-batches" not in page(JobSnapshot(job_status()))


def test_the_rows_of_each_source_are_a_line():
    known, unknown = (
        DataStatus("Parquet", 1, 960, 40, 1960, 48, 0),
        DataStatus("Shards", 0, 1, None, 1, 0, 0),
    )
    running = Page(page(JobSnapshot(job_status(data=(known, unknown))))).text
    assert "Parquet: 960 rows of epoch 2 done, 40 left, 48 redone, 0 lost" in running
    assert "Shards: 1 row of epoch 1 done, 0 redone, 0 lost" in running
    ended = Page(page(JobSnapshot(job_status(state="finished", data=(known,))))).text
    assert "1,960 rows once, 48 redone, 0 lost" in ended


def test_a_metric_shows_its_range_and_a_value_under_the_pointer():
    falling = [(float(step), 2.0 / (1 + step) ** 2) for step in range(50)]
    source = PARTS["curves"](JobSnapshot(job_status(), curves={"loss": falling, "one": [(0, 1.0)]}))
    assert "<small>0.0008 to 2, log</small>" in source  # else all but its start is a flat line
    assert "<title>step 49: 0.0008</title>" in source
    assert "<small></small>" in source  # a single value has no range


def test_a_stopped_job_has_the_ranks_that_it_had():
    history = (event("formed", 2, size=4), event("refused", 3, size=0), event("stopped", 9, size=0))
    source = PARTS["head"](JobSnapshot(job_status(state="stopped", size=0), history, STARTED))
    assert "<dd>4 <small>at the end</small></dd>" in source


def test_the_last_lines_of_rank_0_are_folded_into_the_page():
    job = FakeJob()
    job.prints("".join(f"line {i}\n" for i in range(100)) + "\r10%\r20%")
    job.prints("not this\n", rank=1)
    source = page(JobSnapshot.of(job))
    assert "<details><summary>The last lines of rank 0" in source
    assert "line 99\n20%" in source and "line 80\n" not in source and "not this" not in source


def test_a_failed_job_shows_the_error_that_its_result_raises():
    job = FakeJob()
    job.end("failed", reason="start 1 on tcp://10.0.0.1:1: ValueError: no")
    assert "at line 3 of the cell" in page(JobSnapshot.of(job))
