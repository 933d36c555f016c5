"""The panel: what is sent to the browser, and what its controls ask of the job."""

from __future__ import annotations

from nbelastic.errors import OptionError
from nbelastic.notebook.panel import DRAWINGS, Panel
from nbelastic.render import PARTS

from .fakes import Clock, FakeJob, rank_status


def made(**changes) -> tuple[FakeJob, Panel, Clock]:
    job, clock = FakeJob(**changes), Clock()
    clock.now = 0.0
    return job, Panel(job, clock), clock


def values(panel: Panel) -> dict[str, str]:
    return {name: part.value for name, part in panel._parts.items()}


def test_only_what_has_changed_is_sent_and_empty_parts_take_no_room():
    job, panel, clock = made(size=200, ranks=tuple(rank_status(i) for i in range(200)))
    assert values(panel)["ranks"].count('<tr role="row"') == 21
    assert len("".join(values(panel).values())) < 20_000
    changes: list[str] = []
    parts = {**panel._parts, "stop": panel.stop, "least": panel.least, "most": panel.most}
    for name, widget in parts.items():
        widget.observe(lambda change, name=name: changes.append(f"{name} {change['name']}"))
    clock.now = 1.0
    job.set(commits=121)
    panel.refresh()
    assert changes == ["head value"]
    display = {name: panel._parts[name].layout.display for name in ("head", "progress", "curves")}
    assert display == {"head": None, "progress": "none", "curves": "none"}
    job.curves = {"loss": [(0.0, 1.0)]}
    clock.now = 2.0
    panel.refresh()
    assert panel._parts["curves"].layout.display is None


def test_it_draws_once_a_second_or_after_an_event(monkeypatch):
    drawn = []
    for name in DRAWINGS:
        original = PARTS[name]
        draw = lambda p, name=name, original=original: drawn.append(name) or original(p)  # noqa: E731
        monkeypatch.setitem(PARTS, name, draw)
    job, panel, clock = made(elapsed=36_000.0)
    for tick in range(1, 5):
        assert sorted(drawn) == ["curves", "timeline"]
        clock.now = tick / 4
        job.set(commits=120 + tick)
        panel.refresh()
        assert f"<dd>{120 + tick}</dd>" in values(panel)["head"]
    assert sorted(drawn) == ["curves"] * 2 + ["timeline"] * 2
    job.happens("lost", 3, rank=1, size=3)
    panel.refresh()
    assert len(drawn) == 6 and "Rank 1 is lost" in values(panel)["live"]
    job.set(state="forming")
    panel.refresh()
    assert len(drawn) == 8 and "forming" in values(panel)["head"]


def test_stop_waits_for_the_next_commit_unless_pressed_twice():
    job, panel, _ = made()
    panel.stop.click()
    assert job.asked == ["stop"]
    job.set(state="stopping")
    panel.refresh()
    assert panel.least.disabled and panel.most.disabled and not panel.stop.disabled
    assert panel.stop.description == "Stop now"
    for _ in range(2):
        panel.stop.click()
        assert job.asked == ["stop", "cancel"] and panel.stop.disabled
        job.happens("lost", 3)
        panel.refresh()


def limits(panel: Panel) -> tuple[int, int]:
    return panel.least.value, panel.most.value


def test_the_fields_stay_as_they_were_put_until_the_job_has_other_limits():
    job, panel, clock = made(min_np=2, max_np=None, size=30)
    assert limits(panel) == (2, 0) and job.asked == []
    panel.least.value = 3
    job.set(min_np=3)
    clock.now = 1.0
    panel.refresh()
    panel.most.value = 7
    for reported in (None, 7, 4):  # at last scaled from elsewhere
        assert limits(panel) == (3, 7)
        job.set(max_np=reported)
        clock.now += 1.0
        panel.refresh()
    assert limits(panel) == (3, 4)
    assert job.asked == [{"min_np": 3}, {"max_np": 7}]


def test_refused_limits_are_reset_with_the_reason(monkeypatch):
    job, panel, _ = made(min_np=2, max_np=6)

    def refuse(**_):
        raise OptionError("min_np=9 would be above max_np=6")

    monkeypatch.setattr(job, "scale", refuse)
    panel.least.value = 9
    assert limits(panel) == (2, 6)
    assert "min ranks 9 would be above max ranks 6" in panel._refusal.value
    panel.most.value = 0
    assert limits(panel) == (2, 6)
    assert "keeps one" in panel._refusal.value


def test_the_end_shows_the_final_state_without_controls():
    job, panel, _ = made()
    assert "nbe-stale" in values(panel)["head"]
    job.end("finished", size=3)
    panel.finish()
    assert "finished" in values(panel)["head"] and "nbe-stale" not in values(panel)["head"]
    assert panel.stop.disabled and panel.most.disabled
    shown = [child for box in panel.widget.children for child in getattr(box, "children", [box])]
    assert panel.stop not in shown and panel.most not in shown
    panel.stop.click()
    panel.most.value = 3
    assert job.asked == []
    assert panel._job is None
