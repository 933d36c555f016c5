"""Names of injected faults: errors that differ in numbers only would count as one error."""

from __future__ import annotations

from nbelastic.cluster.worker.rank.fault_injector import _name


def test_names_of_faults_are_different_and_without_numbers():
    names = [_name(number) for number in range(1, 2001)]
    assert len(set(names)) == 2000
    assert all(name.isalpha() for name in names)
    assert names[:2] + names[25:28] == ["a", "b", "z", "aa", "ab"]
