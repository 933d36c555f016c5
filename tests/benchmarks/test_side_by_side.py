"""Crews of ranks that a benchmark measures with, and the picture of what it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from xml.etree import ElementTree

import psutil
import pytest

from benchmarks import side_by_side
from benchmarks.figures import Target, bootstrap, quartiles
from benchmarks.side_by_side import ROOT, Crew, Failed
from tests.support.clusters import until

RANK = "tests.benchmarks.ranks:Rank"


def test_each_rank_answers_for_itself_and_a_sample_ends_with_the_last():
    with Crew(RANK, 2, ("x",)) as crew:
        assert crew.ask("who") == [(0, 2, "x"), (1, 2, "x")]
        assert crew.time("sleep", 0.2, 0.0) >= 0.2
        assert crew.time("sleep", 0.0, 0.2) >= 0.2


def order(pids: list[int], what: str, *arguments: float) -> None:
    """Give a crew one order, noting its processes."""
    with Crew(RANK, 2) as crew:
        pids += crew.ask("process")
        crew.ask(what, *arguments)


@pytest.mark.parametrize(
    ("what", "message"), [("fail", "as it was told to"), ("die", "rank 1 of .* ended during die")]
)
def test_when_one_rank_fails_the_benchmark_says_why_and_all_are_gone(what, message):
    pids: list[int] = []
    with pytest.raises(Failed, match=message):
        order(pids, what, 1)
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_rank_that_does_not_answer_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(side_by_side, "ORDER_S", 5.0)
    pids: list[int] = []
    with pytest.raises(Failed, match=r"no answer from ranks \[1\]"):
        order(pids, "sleep", 0.0, 600.0)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_ranks_end_when_who_gives_the_orders_is_killed():
    code = (
        "import time; from benchmarks.side_by_side import Crew\n"
        f"with Crew({RANK!r}, 2) as crew:\n"
        "    print(*crew.ask('process'), flush=True)\n"
        "    crew.ask('sleep', 600.0, 600.0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "they end")


def test_figures_are_medians_between_quartiles_and_targets_say_whether_they_are_met():
    assert [each for each in vars(quartiles([4.0, 1.0, 2.0, 3.0, 5.0])).values()] == [2.0, 3.0, 4.0]
    assert quartiles([7.0]).high == 7.0
    spread = bootstrap([1.0] * 5 + [2.0] * 6, lambda some: sorted(some)[len(some) // 2])
    assert (spread.low, spread.median, spread.high) == (1.0, 2.0, 2.0)
    assert Target("a", 6.1, 6.0, at_least=True).show() == "a: 6.10 (≥ 6) ok"
    assert Target("b", 0.3, 0.25, at_least=False).show() == "b: 0.30 (≤ 0.25) MISSED"
    assert not Target("c", float("nan"), 1.0, at_least=False).met


def test_the_picture_has_a_bar_for_each_peer_and_a_dot_for_each_kill(tmp_path):
    kills = {"ours": [80.0, 95.0, -3.0], "torchrun": [7000.0, 12000.0]}
    world = {peer: [{"total": each} for each in times] for peer, times in kills.items()}
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.svg"
    figures.write_text(json.dumps({"worlds": {"4": {"mlp-1m": world}}}))
    command = [sys.executable, "-m", "benchmarks.plot", figures, picture]
    subprocess.run(command, cwd=ROOT, check=True)
    root = ElementTree.parse(picture).getroot()
    tags = [each.tag.rpartition("}")[2] for each in root.iter()]
    assert tags.count("rect") == 2
    assert tags.count("circle") == 5
    words = [each.text for each in root.iter() if each.text]
    assert "80 ms" in words and "9.5 s" in words
