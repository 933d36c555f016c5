"""The benchmarks run, at their smallest."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.side_by_side import ROOT


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (
            "allreduce",
            ["--sizes", "4KB", "--backend", "gloo", "--no-mpich"],
            {"4096": {"ours", "ours, any memory", "gloo", "limit"}},
        ),
        (
            "allreduce_tree",
            ["--sizes", "1M", "--backends", "gloo"],
            {"gloo 1M": {"tree", "ordinary"}},
        ),
        (
            "training_step",
            ["--models", "mlp-1m", "--backends", "gloo"],
            {"mlp-1m": {"parameters", "steps", "rounds"}},
        ),
        (
            "exact",
            ["--models", "mlp-1m", "--backends", "gloo"],
            {"mlp-1m": {"parameters", "digests", "rounds"}},
        ),
        (
            "resizing",
            [],
            {name: {"fixed", "found", "equal"} for name in ("SGD 0.1", "SGD 0.4", "Adam 0.01")},
        ),
        ("data", [], {"parquet": {"rounds", "bytes", "memory"}}),
        ("commit", ["--models", "1M"], {"1M": {"step", "commit", "copies", "parameters"}}),
        ("memory", ["--models", "1M"], {"1M": {"nbelastic", "DDP", "parameters"}}),
        ("recovery", ["--models", "mlp-1m", "--alone"], {"mlp-1m": {"ours"}}),
        (
            "control_plane",
            [],
            {"machine": {"100", "1000"}, "driver": {"2"}, "forming": {"gloo", "shm"}},
        ),
        ("sharing", [], {"first", "newcomers", "decisions", "jobs"}),
        ("join", ["--models", "mlp-1m"], {"mlp-1m": {"joins", "state"}}),
    ],
)
def test_it_measures_all_it_compares(tmp_path, name, options, expected):
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--ranks", "2", *options]
    result = subprocess.run(
        [*command, "--json", out],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    # 1: a target was missed, which a busy machine may cause.
    assert result.returncode in {0, 1}, result.stdout + result.stderr
    figures = json.loads(out.read_text())
    world = figures["worlds"]["2"]
    if isinstance(expected, set):
        assert set(world) == expected
    else:
        assert {name: set(each) for name, each in world.items()} == expected
    assert figures["targets"]
    assert "Targets" in result.stdout
    assert result.stderr == ""
