"""What ranks print, as one reader sees it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.render.output import RankLines, Streamer
from tests.notebook.fakes import Output


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def said(start, text, rank="same"):
    return Output(start, start if rank == "same" else rank, text)


def test_by_default_only_rank_0s_output_is_shown_without_prefix(clock):
    streamer = Streamer(clock=clock)
    assert streamer.feed([said(0, "a\n"), said(1, "b\n"), said(0, "c\n")]) == "a\nc\n"


def test_with_none_nobody_speaks(clock):
    streamer = Streamer("none", clock)
    assert streamer.feed([said(0, "a\n")]) + streamer.flush() == ""


def test_a_prefix_stands_only_where_the_speaker_changes(clock):
    streamer = Streamer("all", clock)
    streamer.feed([said(3, "a\nb\n"), said(1, "c\n"), said(3, "d\n")])
    assert streamer.flush() == "[rank 3] a\nb\n[rank 1] c\n[rank 3] d\n"


def test_a_rank_that_continues_is_not_named_again(clock):
    streamer = Streamer("all", clock)
    streamer.feed([said(3, "a\n")])
    clock.now += 1
    streamer.feed([])
    streamer.feed([said(3, "b\n")])
    assert streamer.flush() == "b\n"


def test_an_unfinished_line_is_not_torn_by_another_rank(clock):
    streamer = Streamer("all", clock)
    streamer.feed([said(0, "lo"), said(1, "acc 0.9\n"), said(0, "ss 0.1\n")])
    assert streamer.flush() == "[rank 1] acc 0.9\n[rank 0] loss 0.1\n"


def test_an_unfinished_line_comes_with_the_flush_and_is_ended(clock):
    streamer = Streamer(clock=clock)
    assert streamer.feed([said(0, "no end")]) == ""
    assert streamer.flush() == "no end\n"
    assert streamer.flush() == ""


def test_equal_lines_of_many_ranks_are_one(clock):
    streamer = Streamer("all", clock)
    streamer.feed([said(rank, f"ready\nI am {rank % 2}\n") for rank in (0, 1, 2, 3, 5)])
    clock.now += 0.3
    assert streamer.feed([]) == (
        "[ranks 0-3, 5] ready\n[ranks 0, 2] I am 0\n[ranks 1, 3, 5] I am 1\n"
    )


def test_lines_wait_for_their_like_only_a_moment(clock):
    streamer = Streamer("all", clock)
    assert streamer.feed([said(0, "ready\n")]) == ""
    clock.now += 0.3
    assert streamer.feed([said(1, "ready\n")]) == "[rank 0] ready\n"
    assert streamer.flush() == "[rank 1] ready\n"


def test_a_line_that_one_rank_repeats_comes_as_often(clock):
    streamer = Streamer("all", clock)
    streamer.feed([said(0, "x\nx\n"), said(1, "x\nx\n")])
    assert streamer.flush() == "[ranks 0-1] x\nx\n"


def test_equal_lines_are_not_joined_across_a_ranks_own_order(clock):
    streamer = Streamer("all", clock)
    streamer.feed([said(0, "a\nb\n"), said(1, "b\na\n")])
    assert streamer.flush() == "[rank 0] a\n[ranks 0-1] b\n[rank 1] a\n"


def test_a_rank_without_a_number_is_called_by_its_start(clock):
    streamer = Streamer("all", clock)
    streamer.feed([said(7, "warming up\n", rank=None)])
    assert streamer.flush() == "[start 7] warming up\n"


def test_a_progress_bar_of_rank_0_moves(clock):
    streamer = Streamer(clock=clock)
    assert streamer.feed([said(0, "epoch 1\n\r 10%")]) == "epoch 1\n\r 10%"
    assert streamer.feed([said(0, "\r 20%\r 30%")]) == "\r 30%"
    assert streamer.feed([said(0, "\r100%\ndone\n")]) == "\r100%\ndone\n"
    assert streamer.flush() == ""


def test_a_progress_bar_that_ends_in_a_return_moves_too(clock):
    streamer = Streamer(clock=clock)
    assert streamer.feed([said(0, "10%\r")]) == "\r10%"
    assert streamer.feed([said(0, "20%\r")]) == "\r20%"
    assert streamer.flush() == "\n"


def test_another_speaker_does_not_write_into_a_progress_bar(clock):
    streamer = Streamer("all", clock)
    assert streamer.feed([said(0, "\r 10%")]) == "\r[rank 0]  10%"
    streamer.feed([said(2, "hello\n")])
    clock.now += 0.3
    assert streamer.feed([]) == "\n[rank 2] hello\n"
    assert streamer.feed([said(0, "\r 20%")]) == "\r[rank 0]  20%"


def test_a_progress_bar_of_another_rank_comes_once_as_it_ended(clock):
    streamer = Streamer("all", clock)
    assert streamer.feed([said(1, "\r 10%"), said(1, "\r 90%"), said(1, "\r100%\n")]) == ""
    assert streamer.flush() == "[rank 1] 100%\n"


def test_a_flood_is_cut_and_says_where_the_rest_is(clock):
    streamer = Streamer(clock=clock, lines_per_s=200, burst=500)
    shown = streamer.feed([said(0, "".join(f"{i}\n" for i in range(2_000)))])
    assert shown.splitlines() == [str(i) for i in range(500)]
    end = streamer.flush().splitlines()
    assert end[0] == "… 1,490 lines more: job.logs()"
    assert end[1:] == [str(i) for i in range(1_990, 2_000)]


def test_a_flood_costs_only_so_many_lines_in_the_long_run(clock):
    streamer = Streamer(clock=clock, lines_per_s=200, burst=500)
    shown = 0
    for _ in range(600):  # a minute, at 5,000 lines a second
        clock.now += 0.1
        shown += streamer.feed([said(0, "x\n" * 500)]).count("\n")
    assert 60 * 200 * 0.9 < shown < 60 * 220 + 500
    clock.now += 10
    assert streamer.feed([said(0, "quiet again\n")]).endswith("quiet again\n")


def test_a_cut_of_a_few_lines_loses_nothing(clock):
    streamer = Streamer(clock=clock, lines_per_s=200, burst=5)
    text = "".join(f"{i}\n" for i in range(12))
    assert streamer.feed([said(0, text)]) + streamer.flush() == text


def test_an_endless_line_is_cut(clock):
    shown = Streamer(clock=clock).feed([said(0, "x" * 100_000 + "\n")])
    assert len(shown) < 5_000
    assert shown.endswith("96,000 characters more: job.logs()\n")


# A line has a letter per rank it may come from, so that equal lines of several ranks occur.
_pieces = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.text("ab\n", max_size=6),
        st.sampled_from([0.0, 0.1, 0.5]),
    ),
    max_size=30,
)
_PREFIX = re.compile(r"\[ranks? ([\d, -]+)\] ")


def _heard(text):
    """Read what a Streamer has written back into lines by rank."""
    lines = {}
    who = []
    for line in text.splitlines():
        match = _PREFIX.match(line)
        if match:
            bounds = [run.split("-") for run in match[1].split(", ")]
            who = [n for run in bounds for n in range(int(run[0]), int(run[-1]) + 1)]
        for rank in who:
            lines.setdefault(rank, []).append(line[match.end() if match else 0 :])
    return lines


@settings(max_examples=60, deadline=None)
@given(_pieces)
def test_every_line_appears_once_and_in_its_ranks_order(pieces):
    clock = Clock()
    streamer = Streamer("all", clock, lines_per_s=None)
    shown = ""
    spoken = {}
    for rank, text, pause in pieces:
        spoken[rank] = spoken.get(rank, "") + text
        shown += streamer.feed([said(rank, text)])
        clock.now += pause
    shown += streamer.flush()
    assert _heard(shown) == {r: text.splitlines() for r, text in spoken.items() if text}


@settings(max_examples=30, deadline=None)
@given(_pieces)
def test_of_rank_0_every_line_appears_once_as_it_was(pieces):
    streamer = Streamer(clock=Clock(), lines_per_s=None)
    shown = "".join(streamer.feed([said(rank, text)]) for rank, text, _ in pieces)
    shown += streamer.flush()
    spoken = "".join(text for rank, text, _ in pieces if rank == 0)
    assert shown.splitlines() == spoken.splitlines()


def test_a_line_that_does_not_end_is_cut(clock, monkeypatch):
    monkeypatch.setattr("nbelastic.render.output.MAX_UNFINISHED", 1_000)
    streamer = Streamer(clock=clock)
    shown = "".join(streamer.feed([said(0, "." * 100)]) for _ in range(11))
    assert shown == "." * 1_100 + "\n"
    assert streamer.feed([said(0, "next\n")]) == "next\n"


def test_a_line_end_may_come_in_two_pieces():
    lines = RankLines()
    assert lines.take(said(0, "a\r")) == []
    assert lines.take(said(0, "\nb")) == ["a"]
    assert lines.rest() == [(0, 0, "b")]
