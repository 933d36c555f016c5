"""What ranks print, as one reader sees it."""

import re

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
        ("all", [said(rank, f"ready\nI am {rank % 2}\n") for rank in (0, 1, 2, 3, 5)],
         "[ranks 0-3, 5] ready\n[ranks 0, 2] I am 0\n[ranks 1, 3, 5] I am 1\n"),
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
        (  # equal lines wait for each other only a moment, and a rank that goes on has no new name
            "all",
            [("ready\n", 0, ""), ("ready\n", 1, "[rank 0] ready\n"), ("", 0, "[rank 1] ready\n"),
             ("steady\n", 1, "")],
            "steady\n",
        ),
        (
            "rank0",
            [("epoch 1\n\r 10%", 0, "epoch 1\n\r 10%"), ("\r 20%\r 30%", 0, "\r 30%"),
             ("\r100%\ndone\n", 0, "\r100%\ndone\n")],
            "",
        ),
        ("rank0", [("10%\r", 0, "\r10%"), ("20%\r", 0, "\r20%")], "\n"),
        (  # no other rank writes into a progress bar
            "all",
            [("\r 10%", 0, "\r[rank 0]  10%"), ("hello\n", 2, ""), ("", 0, "\n[rank 2] hello\n"),
             ("\r 20%", 0, "\r[rank 0]  20%")],
            "\n",
        ),
    ],
)  # fmt: skip
def test_what_comes_in_pieces_is_shown_as_it_comes(clock, mode, steps, rest):
    streamer = Streamer(mode, clock)
    for text, rank, shown in steps:
        assert streamer.feed([said(rank, text)] if text else []) == shown
        clock.now += 0.3
    assert streamer.flush() == rest


@pytest.mark.parametrize(("lines", "cut"), [(1_007, 0), (2_000, 990)])
def test_a_flood_is_cut_and_says_where_the_rest_is_but_a_few_lines_are_not(clock, lines, cut):
    streamer = Streamer(clock=clock)
    shown = streamer.feed([said(0, "".join(f"{i}\n" for i in range(lines)))]).splitlines()
    assert shown == [str(i) for i in range(1_000)]
    words = [f"… {cut} lines more: job.logs()"] if cut else []
    end = [str(i) for i in range(1_000 + cut, lines)]
    assert streamer.flush().splitlines() == [*words, *end]


def test_a_flood_costs_only_so_many_lines_in_the_long_run(clock):
    streamer = Streamer(clock=clock)
    shown = 0
    for _ in range(600):  # a minute, at 5,000 lines a second
        clock.now += 0.1
        shown += streamer.feed([said(0, "x\n" * 500)]).count("\n")
    assert 60 * 200 * 0.9 < shown < 60 * 220 + 1_000
    clock.now += 10
    assert streamer.feed([said(0, "quiet again\n")]).endswith("quiet again\n")


# A line has a letter per rank it may come from, so that equal lines of several ranks occur.
_pieces = st.lists(
    st.tuples(st.integers(0, 3), st.text("ab\n", max_size=6), st.sampled_from([0.0, 0.1, 0.5])),
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
    streamer = Streamer("all", clock)
    shown = ""
    spoken = {}
    for rank, text, pause in pieces:
        spoken[rank] = spoken.get(rank, "") + text
        shown += streamer.feed([said(rank, text)])
        clock.now += pause
    shown += streamer.flush()
    assert _heard(shown) == {r: text.splitlines() for r, text in spoken.items() if text}


def test_a_line_that_does_not_end_is_cut(clock, monkeypatch):
    monkeypatch.setattr("nbelastic.render.output.MAX_UNFINISHED", 1_000)
    streamer = Streamer(clock=clock)
    shown = "".join(streamer.feed([said(0, "." * 100)]) for _ in range(11))
    assert shown == "." * 1_100 + "\n"
    assert streamer.feed([said(0, "next\n")]) == "next\n"
