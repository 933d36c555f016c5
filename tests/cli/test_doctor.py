"""The findings of ``doctor``: what is said of a cluster, and the exit code."""

from __future__ import annotations

import dataclasses

import pytest

from nbelastic.cli.doctor import Side, examine, findings, report

VERSIONS = {"python": "3.11", "nbelastic": "0.1.0", "torch": "2.13.0"}
HERE = Side("this process", VERSIONS, shm_bytes=2**30)


def worker(name: str = "tcp://a:1", **changes) -> Side:
    return dataclasses.replace(HERE, name=name, **changes)


def facts(*workers: Side, scheduler: dict[str, str] = VERSIONS):
    return findings(HERE, Side("the scheduler", scheduler), workers)


@pytest.mark.parametrize(
    ("given", "what", "state", "says"),
    [
        (facts(worker(versions={**VERSIONS, "torch": "2.6.0"})), "versions", "bad", "torch 2.6.0"),
        (facts(worker(), scheduler={}), "versions", "bad", "missing"),
        (facts(), "workers", "bad", "none present"),
        (facts(worker(unreachable=("tcp://b:1",))), "ports", "bad", "cannot connect to tcp://b:1"),
        (facts(worker(native="no compiler")), "native part", "note", "no compiler"),
        (facts(worker(shm_bytes=2**26)), "/dev/shm", "note", "64 MiB"),
        (facts(worker(gpus=("H200",))), "GPUs", "ok", "H200"),
    ],
)  # fmt: skip
def test_what_is_found_is_said_with_what_to_do(given, what, state, says):
    (found,) = [each for each in given if each.what == what]
    assert found.state == state
    assert says in found.detail
    assert state == "ok" or found.advice


@pytest.mark.parametrize(
    "given",
    [
        facts(worker(), worker("tcp://b:1")),
        facts(worker(), scheduler={**VERSIONS, "torch": "missing"}),
    ],
)
def test_a_good_cluster_has_nothing_bad(given):
    assert {each.state for each in given if each.advice == ""} == {"ok"}
    assert "bad" not in {each.state for each in given}


def test_a_bad_finding_is_exit_code_1():
    lines: list[str] = []
    assert report(findings(*examine(None)), lines.append) == 0  # this machine
    assert any("versions" in line and "✓" in line for line in lines)
    assert report(facts(), lines.append) == 1
