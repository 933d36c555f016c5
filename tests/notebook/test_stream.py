"""What ranks print, as one reader sees it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.driver import Output
from nbelastic.render.output import Streamer
from tests.notebook.fakes import Clock


@pytest.fixture
def clock():
    return Clock()


def said(start, text, rank="same"):
    return Output(start, start if rank == "same" else rank, text)


@pytest.mark.parametrize(
    ("mode", "printed", "shown"),
    [
        ("rank0", [said(0, "a\n"), said(1, "b\n"), said(0, "c\n")], "a\nc\n"),
        ("rank0", [said(0, "no end")], "no end\n"),
        ("all", [said(1, "a\r"), said(1, "\nb")], "[rank 1] a\nb\n"),
        ("rank0", [said(0, "x" * 4_100 + "\n")],
         "x" * 4_000 + " … 100 characters more: job.logs()\n"),
        ("none", [said(0, "a\n")], ""),
        ("all", [said(3, "a\nb\n"), said(1, "c\n"), said(3, "d\n")],
         "[rank 3] a\nb\n[rank 1] c\n[rank 3] d\n"),
        ("all", [said(0, "lo"), said(1, "acc 0.9\n"), said(0, "ss 0.1\n")],
         "[rank 1] acc 0.9\n[rank 0] loss 0.1\n"),
        ("all", [said(7, "warming up\n", rank=None)], "[start 7] warming up\n"),
        ("all", [said(1, "\r 10%"), said(1, "\r 90%"), said(1, "\r100%\n")], "[rank 1] 100%\n"),
    ],
)  # fmt: skip
def test_lines_are_whole_and_named_where_the_speaker_changes(clock, mode, printed, shown):
    streamer = Streamer(mode, clock)
    assert streamer.feed(printed) + streamer.flush() == shown
    assert streamer.flush() == ""


@pytest.mark.parametrize(
    ("mode", "steps", "rest"),
    [
        (
            "rank0",
            [("epoch 1\n\r 10%", 0, "epoch 1\n\r 10%"), ("\r 20%\r 30%", 0, "\r 30%"),
             ("\r100%\ndone\n", 0, "\r100%\ndone\n")],
            "",
        ),
        ("rank0", [("10%\r", 0, "\r10%"), ("20%\r", 0, "\r20%")], "\n"),
        (  # no other rank writes into a progress bar
            "all",
            [("\r 10%", 0, "\r[rank 0]  10%"), ("hello\n", 2, "\n[rank 2] hello\n"),
             ("\r 20%", 0, "\r[rank 0]  20%")],
            "\n",
        ),
    ],
)  # fmt: skip
def test_what_comes_in_pieces_is_shown_as_it_comes(clock, mode, steps, rest):
    streamer = Streamer(mode, clock)
    for text, rank, shown in steps:
        assert streamer.feed([said(rank, text)]) == shown
    assert streamer.flush() == rest


def test_a_flood_is_cut_and_says_where_the_rest_is(clock):
    streamer = Streamer(clock=clock)
    shown = streamer.feed([said(0, "".join(f"{i}\n" for i in range(2_000)))]).splitlines()
    assert shown == [str(i) for i in range(1_000)]
    assert streamer.flush() == "… 1,000 lines more: job.logs()\n"


def test_a_flood_costs_only_so_many_lines_in_the_long_run(clock):
    streamer, shown = Streamer(clock=clock), ""
    for _ in range(600):  # a minute, at 5,000 lines a second
        clock.now += 0.1
        shown += streamer.feed([said(0, "x\n" * 500)])
    assert 60 * 200 * 0.9 < shown.count("x") <= 60 * 200 + 1_000
    assert shown.count("lines more") <= 60
    clock.now += 10
    assert streamer.feed([said(0, "quiet again\n")]).endswith("quiet again\n")


_pieces = st.lists(st.tuples(st.integers(0, 3), st.text("ab\n", max_size=6)), max_size=30)


@settings(max_examples=60, deadline=None)
@given(_pieces)
def test_every_line_appears_once_and_in_its_ranks_order(pieces):
    streamer, spoken, heard, rank = Streamer("all"), {}, {}, None
    for each, text in pieces:
        spoken[each] = spoken.get(each, "") + text
    shown = "".join(streamer.feed([said(*piece)]) for piece in pieces) + streamer.flush()
    for line in shown.splitlines():
        prefix, _, text = line.rpartition("] ")
        rank = int(prefix.removeprefix("[rank ")) if prefix else rank
        heard.setdefault(rank, []).append(text)
    assert heard == {rank: text.splitlines() for rank, text in spoken.items() if text}


def test_a_line_that_does_not_end_is_cut(clock, monkeypatch):
    monkeypatch.setattr("nbelastic.render.output.MAX_UNFINISHED", 1_000)
    streamer = Streamer(clock=clock)
    shown = "".join(streamer.feed([said(0, "." * 100)]) for _ in range(11))
    assert shown == "." * 1_100 + "\n"
    assert streamer.feed([said(0, "next\n")]) == "next\n"
