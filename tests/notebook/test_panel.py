from __future__ import annotations

import logging
import threading
import time

from nbelastic.errors import OptionError
from nbelastic.notebook.panel import Panel
from nbelastic.notebook.render import PARTS

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
    for name, widget in (("stop", panel.stop), ("slider", panel.slider)):
        widget.observe(lambda change, name=name: changes.append((name, change["name"])))
    return changes


def test_it_shows_the_job_at_once():
    _, panel, _ = made()
    assert "running" in values(panel)["head"]
    assert values(panel)["ranks"].count("<tr>") == 5


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


def test_stop_asks_for_the_next_commit_first_and_for_now_the_second_time():
    job, panel, _ = made()
    panel.stop.click()
    assert job.asked == ["stop"]
    assert panel.stop.description == "Stop now" and not panel.stop.disabled
    panel.stop.click()
    assert job.asked == ["stop", "cancel"]
    assert panel.stop.disabled
    panel.stop.click()
    assert job.asked == ["stop", "cancel"]


def test_the_slider_shows_the_limits_of_the_job():
    _, panel, _ = made(min_np=2, max_np=6)
    assert panel.slider.value == (2, 6)
    assert (panel.slider.min, panel.slider.max) == (1, 8)
    assert panel.slider.continuous_update is False


def test_the_slider_has_room_for_what_there_is():
    job, panel, clock = made(min_np=2, max_np=None, size=30)
    assert (panel.slider.value, panel.slider.max) == ((2, 30), 30)
    job.set(size=40)
    clock.now = 1.0
    panel.refresh()
    assert (panel.slider.value, panel.slider.max) == ((2, 40), 40)
    assert job.asked == []


def test_moving_the_slider_scales_by_what_was_moved():
    job, panel, _ = made(min_np=2, max_np=6)
    panel.slider.value = (2, 7)
    panel.slider.value = (3, 6)
    assert job.asked == [(None, 7), (3, None)]


def test_without_a_limit_the_upper_end_stays_unlimited():
    job, panel, _ = made(min_np=2, max_np=None)
    panel.slider.value = (3, 8)
    assert job.asked == [(3, None)]
    panel.slider.value = (2, 5)
    assert job.asked[-1] == (None, 5)


def test_the_slider_stays_where_it_was_put_until_the_job_follows():
    job, panel, clock = made(min_np=2, max_np=6)
    panel.slider.value = (2, 7)
    clock.now = 1.0
    panel.refresh()
    assert panel.slider.value == (2, 7)
    job.set(max_np=7)
    clock.now = 2.0
    panel.refresh()
    job.set(max_np=4)  # scaled from elsewhere
    clock.now = 3.0
    panel.refresh()
    assert panel.slider.value == (2, 4)
    assert job.asked == [(None, 7)]


def test_the_slider_goes_back_where_the_job_does_not_follow():
    _, panel, clock = made(min_np=2, max_np=6)
    panel.slider.value = (2, 7)
    clock.now = 10.0
    panel.refresh()
    assert panel.slider.value == (2, 6)


def test_limits_that_the_job_refuses_are_taken_back(monkeypatch):
    job, panel, clock = made(min_np=2, max_np=6)

    def refuse(**_):
        raise OptionError("min_np=4 would be above max_np=3")

    monkeypatch.setattr(job, "scale", refuse)
    panel.slider.value = (4, 6)
    clock.now = 1.0
    panel.refresh()
    assert panel.slider.value == (2, 6)
    assert not panel.broken


def test_the_end_puts_in_the_final_state_and_takes_the_controls_away():
    job, panel, _ = made()
    job.end("finished", size=3)
    panel.finish()
    assert "finished" in values(panel)["head"]
    assert panel.stop.disabled and panel.slider.disabled
    shown = [child for box in panel.widget.children for child in getattr(box, "children", [box])]
    assert panel.stop not in shown and panel.slider not in shown
    panel.stop.click()
    panel.slider.value = (1, 3)
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
    assert len(caplog.records) == 1
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
        panel.slider.value = (2, 7 - i % 2)
    panel.stop.click()
    done.set()
    for thread in threads:
        thread.join(10)
    assert job.asked[-1] == "stop"
    assert not panel.broken


def test_two_hundred_ranks_are_twenty_rows():
    ranks = tuple(rank_status(i) for i in range(200))
    _, panel, _ = made(size=200, ranks=ranks)
    assert values(panel)["ranks"].count("<tr>") == 21
    assert len("".join(values(panel).values())) < 20_000
