from __future__ import annotations

import logging
import threading
import time

from nbelastic.errors import OptionError
from nbelastic.notebook.panel import Panel
from nbelastic.render import PARTS
from tests.support.logs import own_records

from .fakes import FakeJob, rank_status


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def made(**changes) -> tuple[FakeJob, Panel, Clock]:
    job, clock = FakeJob(**changes), Clock()
    return job, Panel(job, clock), clock


def values(panel: Panel) -> dict[str, str]:
    return {name: part.value for name, part in panel._parts.items()}


def sent(panel: Panel) -> list[tuple[str, str]]:
    """Every change of a trait from now on, as widget and trait."""
    changes: list[tuple[str, str]] = []
    for name, part in panel._parts.items():
        part.observe(lambda change, name=name: changes.append((name, change["name"])))
    for name, widget in (("stop", panel.stop), ("least", panel.least), ("most", panel.most)):
        widget.observe(lambda change, name=name: changes.append((name, change["name"])))
    return changes


def test_it_shows_the_job_at_once():
    _, panel, _ = made()
    assert "running" in values(panel)["head"]
    assert values(panel)["ranks"].count('<tr role="row"') == 5


def test_only_what_has_changed_is_sent():
    job, panel, clock = made()
    changes = sent(panel)
    clock.now = 1.0
    job.set(commits=121)
    assert panel.refresh()
    assert changes == [("head", "value")]


def test_it_looks_no_more_than_four_times_a_second():
    job, panel, clock = made()
    looked = 0
    for tick in range(1, 101):
        clock.now = tick / 100
        job.set(commits=120 + tick)
        looked += panel.refresh()
    assert looked in (3, 4)


def test_an_event_and_a_new_state_are_shown_at_once():
    job, panel, _ = made()
    job.happens("lost", 3, rank=1, size=3)
    assert panel.refresh()
    assert "Rank 1 is lost" in values(panel)["live"]
    job.set(state="forming")
    assert panel.refresh()
    assert "forming" in values(panel)["head"]
    assert not panel.refresh()


def test_an_update_reads_the_state_of_all_ranks_once():
    reads = []

    class Counted(FakeJob):
        def __getattribute__(self, name):
            reads.append(name)
            return super().__getattribute__(name)

    panel = Panel(Counted())
    reads.clear()
    panel._job.history = ()
    panel._updated = float("-inf")
    assert panel.refresh()
    assert reads.count("status") == 1


def test_empty_parts_take_no_room():
    job, panel, clock = made()
    assert panel._parts["progress"].layout.display == "none"
    job.shapes = {"loss": [(0.0, 1.0)]}
    clock.now = 1.0
    panel.refresh()
    assert panel._parts["curves"].layout.display is None


def test_the_timeline_is_not_drawn_again_for_a_commit(monkeypatch):
    drawn = []
    original = PARTS["timeline"]
    monkeypatch.setitem(PARTS, "timeline", lambda p: drawn.append(p) or original(p))
    job, panel, clock = made()
    for tick in range(1, 5):
        clock.now = float(tick)
        job.set(commits=120 + tick)
        panel.refresh()
    assert len(drawn) == 1
    job.happens("lost", 3)
    panel.refresh()
    assert len(drawn) == 2


def test_stop_waits_for_the_next_commit_unless_pressed_twice():
    job, panel, _ = made()
    panel.stop.click()
    assert job.asked == ["stop"]
    assert panel.stop.description == "Stop now" and not panel.stop.disabled
    panel.stop.click()
    assert job.asked == ["stop", "cancel"]
    assert panel.stop.disabled
    panel.stop.click()
    assert job.asked == ["stop", "cancel"]


def limits(panel: Panel) -> tuple[int, int]:
    return panel.least.value, panel.most.value


def test_the_fields_show_the_limits_of_the_job_and_have_names():
    _, panel, _ = made(min_np=2, max_np=6)
    assert limits(panel) == (2, 6)
    assert (panel.least.description, panel.most.description) == ("Min ranks", "Max ranks")
    assert panel.least.continuous_update is False


def test_no_limit_is_shown_as_none():
    job, panel, clock = made(min_np=2, max_np=None, size=30)
    assert limits(panel) == (2, 0)
    job.set(size=40)
    clock.now = 1.0
    panel.refresh()
    assert limits(panel) == (2, 0)
    assert job.asked == []


def test_a_field_scales_by_what_was_changed():
    job, panel, _ = made(min_np=2, max_np=6)
    panel.most.value = 7
    job.set(max_np=7)
    panel.least.value = 3
    assert job.asked == [(None, 7), (3, None)]


def test_a_job_without_a_limit_keeps_none_until_it_is_given_one():
    job, panel, _ = made(min_np=2, max_np=None)
    panel.least.value = 3
    job.set(min_np=3)
    panel.most.value = 5
    assert job.asked == [(3, None), (None, 5)]


def test_the_fields_stay_as_they_were_put_until_the_job_follows():
    job, panel, clock = made(min_np=2, max_np=6)
    panel.most.value = 7
    clock.now = 1.0
    panel.refresh()
    assert limits(panel) == (2, 7)
    job.set(max_np=7)
    clock.now = 2.0
    panel.refresh()
    job.set(max_np=4)  # scaled from elsewhere
    clock.now = 3.0
    panel.refresh()
    assert limits(panel) == (2, 4)
    assert job.asked == [(None, 7)]


def test_a_field_changed_during_an_update_keeps_its_value(monkeypatch):
    job, panel, clock = made(min_np=2, max_np=6)
    clock.now = 1.0
    changing = threading.Thread(target=lambda: setattr(panel.most, "value", 5))
    draw = PARTS["head"]

    def draw_meanwhile(snapshot):
        changing.start()
        while panel.most.value != 5:
            time.sleep(0.001)
        return draw(snapshot)

    monkeypatch.setitem(PARTS, "head", draw_meanwhile)
    panel.refresh()
    changing.join()
    assert limits(panel) == (2, 5)
    assert job.asked == [(None, 5)]


def test_the_fields_go_back_where_the_job_does_not_follow():
    _, panel, clock = made(min_np=2, max_np=6)
    panel.most.value = 7
    clock.now = 10.0
    panel.refresh()
    assert limits(panel) == (2, 6)


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
    assert not panel.broken


def test_only_a_running_panel_reports_missing_news():
    job, panel, _ = made()
    assert "nbe-stale" in values(panel)["head"]
    job.end("finished", size=3)
    panel.finish()
    assert "nbe-stale" not in values(panel)["head"]


def test_the_end_shows_the_final_state_without_controls():
    job, panel, _ = made()
    job.end("finished", size=3)
    panel.finish()
    assert "finished" in values(panel)["head"]
    assert panel.stop.disabled and panel.most.disabled
    shown = [child for box in panel.widget.children for child in getattr(box, "children", [box])]
    assert panel.stop not in shown and panel.most not in shown
    panel.stop.click()
    panel.most.value = 3
    assert job.asked == []
    assert panel._job is None
    assert not panel.refresh()
    panel.finish()


def test_a_fault_is_logged_once_and_switches_the_panel_off(caplog):
    job, panel, clock = made()
    job.status = None
    with caplog.at_level(logging.WARNING):
        for tick in range(5):
            clock.now = float(tick)
            assert not panel.refresh()
    panel.finish()
    panel.stop.click()
    assert panel.broken
    assert len(own_records(caplog)) == 1
    assert "job 'quickstart'" in caplog.text


def test_a_stop_that_fails_does_not_end_the_panel(monkeypatch, caplog):
    job, panel, _ = made()

    def fail():
        raise ConnectionError("gone")

    monkeypatch.setattr(job, "stop", fail)
    panel.stop.click()
    job.happens("lost", 3)
    assert panel.refresh()
    assert "gone" in caplog.text


def test_callbacks_and_refreshes_may_come_in_any_thread():
    job, panel, _ = made(min_np=2, max_np=6)
    panel._clock = time.monotonic
    done = threading.Event()

    def refresh():
        while not done.is_set():
            job.happens("lost", 3)
            panel.refresh()

    threads = [threading.Thread(target=refresh) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(50):
        panel.most.value = 7 - i % 2
    panel.stop.click()
    done.set()
    for thread in threads:
        thread.join(10)
    assert job.asked[-1] == "stop"
    assert not panel.broken


def test_two_hundred_ranks_are_twenty_rows():
    ranks = tuple(rank_status(i) for i in range(200))
    _, panel, _ = made(size=200, ranks=ranks)
    assert values(panel)["ranks"].count('<tr role="row"') == 21
    assert len("".join(values(panel).values())) < 20_000
