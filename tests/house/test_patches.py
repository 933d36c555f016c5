"""Tests leave the modules of the standard library as they are.

The clusters of a session have threads in this process. A clock that is replaced in ``time`` itself
ends their event loops; a test replaces the name in the module under test instead.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

ALLOWED = {
    ("cli/test_options.py", "sys"),  # its stdout, to which no cluster writes
    ("benchmarks/test_benchmarks.py", "sys"),  # its arguments, for a benchmark in this process
    ("cli/test_entry.py", "sys"),  # its arguments, for a command in this process
    ("conftest.py", "os"),  # fork(), for this thread alone
    ("cli/test_script.py", "os"),  # access(), which denies root nothing
}


def replaced(text: str) -> set[str]:
    """Return the modules of the standard library of which something that exists is replaced."""
    modules = set()
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr != "setattr" or any(each.arg == "raising" for each in call.keywords):
            continue
        target = call.args[0]
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        if name in sys.stdlib_module_names:
            modules.add(name)
    return modules


def test_no_module_of_the_standard_library_is_changed():
    found = {
        (str(path.relative_to(TESTS)), module)
        for path in sorted(TESTS.rglob("*.py"))
        for module in replaced(path.read_text())
    }
    assert found == ALLOWED


def test_a_change_is_seen_through_the_module_under_test():
    assert replaced("monkeypatch.setattr(supervision.time, 'monotonic', next)") == {"time"}
    assert replaced("monkeypatch.setattr(supervision, 'time', clock)") == set()
    assert replaced("monkeypatch.setattr(sys, 'mark', 1, raising=False)") == set()
