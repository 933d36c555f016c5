"""The lines of ``doctor`` on a cluster."""

from __future__ import annotations

import pytest

from nbelastic.cli.doctor import examine, judge

GOOD = {"tcp://a:1": ("", []), "tcp://b:1": ("", [])}


@pytest.mark.parametrize(
    ("answers", "begins", "says"),
    [
        ({}, "✗ workers", "0 present"),
        ({**GOOD, "tcp://a:1": ("", ["tcp://b:1"])}, "✗ ports", "cannot connect to tcp://b:1 →"),
        ({**GOOD, "tcp://b:1": ("no compiler", [])}, "· native part", "tcp://b:1: no compiler →"),
    ],
)
def test_what_is_found_is_said_with_what_to_do(answers, begins, says):
    (found,) = [line for line in judge(answers, of_cluster=True) if line[0] != "✓"]
    assert found.startswith(begins) and says in found


def test_a_good_cluster_and_this_machine_have_nothing_bad():
    assert {line[0] for line in (*judge(GOOD, of_cluster=True), *examine(None))} == {"✓"}
