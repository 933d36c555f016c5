"""The benchmarks run, at their smallest."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from xml.etree import ElementTree

import dask
import pytest
import torch

from benchmarks.figures import Target, bootstrap, quartiles
from benchmarks.side_by_side import ROOT

QUICK = ["--quick", "--ranks", "2"]


@pytest.fixture
def _this_process() -> Iterator[None]:
    """What a command sets is set back."""
    handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    key = "distributed.worker.profile.enabled"
    with dask.config.set({key: dask.config.get(key)}):
        yield
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(threads)


MEASURED = [
    (
        "allreduce",
        ["--sizes", "4KB", "--backend", "gloo", "--no-mpich"],
        {"4096": {"ours", "ours, any memory", "gloo", "limit"}},
    ),
    ("commit", ["--models", "1M"], {"1M": {"step", "commit", "copies", "parameters"}}),
    ("recovery", ["--models", "mlp-1m", "--alone"], {"mlp-1m": {"ours", "ours, worker"}}),
]
"""One of operations, one of a rank, one of jobs; `make nightly` runs all as commands."""


@pytest.mark.usefixtures("_this_process")
@pytest.mark.parametrize(("name", "options", "expected"), MEASURED)
def test_it_measures_all_it_compares(tmp_path, monkeypatch, capsys, name, options, expected):
    out = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", [name, *QUICK, *options, "--json", str(out)])
    code = importlib.import_module(f"benchmarks.{name}").main()
    printed = capsys.readouterr()
    # 1: a target was missed, which a busy machine may cause.
    assert code in {0, 1}, printed.out + printed.err
    figures = json.loads(out.read_text())
    assert {model: set(each) for model, each in figures["worlds"]["2"].items()} == expected
    assert figures["targets"]
    assert "Targets" in printed.out
    assert printed.err == ""


COMMANDS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if "def main() -> int:" in path.read_text() and path.stem != "plot"  # which has an argument
)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_can_be_run(name):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    printed = result.stdout + result.stderr
    assert "Traceback" not in printed, printed
    if result.returncode == 2 and ("pip install" in printed or "no GPU" in printed):
        pytest.skip(printed)
    assert result.returncode in {0, 1}, printed  # 1: a target was missed


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
