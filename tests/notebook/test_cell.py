"""A cell as a function: what it takes along, how it runs, what comes back."""

import linecache
import subprocess
import sys
import textwrap
import threading
import types
import xml.dom.minidom

import cloudpickle
import pytest

import nbelastic.chaos
from nbelastic.cluster.rank_error import pack_error, unpack_error
from nbelastic.notebook.cell import (
    CellError,
    CellFunction,
    ReturnedValue,
    pack,
)
from nbelastic.notebook.names import users_names


def cell(body, namespace=None, **options):
    options.setdefault("above", "%%elastic_train")
    options.setdefault("filename", "Cell In[5]")
    return CellFunction(textwrap.dedent(body), namespace or {}, **options)


def sent(function):
    return cloudpickle.loads(cloudpickle.dumps(function))


def captured(body, **namespace):
    return set(cell(body, namespace).captured)


# -- what it takes along -----------------------------------------------------------------------

EVERYTHING = dict.fromkeys(("a", "b", "x", "lr", "batch", "loader", "Net", "helper", "device"), 1)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("lr += 1", {"lr"}),
        ("def f():\n    return x\nx = 7\nf()", set()),
        ("@helper\ndef f():\n    return x\nx = 7\nf()", {"helper"}),
        ("def f():\n    return x\nif a:\n    x = 7\nf()", {"a", "x"}),
        ("def train():\n    global lr\n    lr += 1\ntrain()", {"lr"}),
        ("[x for x in loader]\nx", {"loader", "x"}),
        ("[batch := x for x in loader]\nbatch", {"loader"}),
        ("class A(Net):\n    lr = lr\n    def f(self): return a(lr)", {"Net", "lr", "a"}),
        ("for batch in loader:\n    x = batch\nx", {"loader"}),
        ("if a:\n    x = 1\nelse:\n    x = 2\nx", {"a"}),
        ("try:\n    x = 1\nexcept ImportError:\n    pass\nx", {"x"}),
        ("try:\n    pass\nexcept ValueError as x:\n    print(x)\nx", {"x"}),
        ("match a:\n    case [x, *b]:\n        x\n    case {'k': lr, **b}:\n        lr, b", {"a"}),
        ("match a:\n    case 1:\n        x = 1\nx", {"a", "x"}),
        ("x = 1\ndel x\nx", {"x"}),
        ("from nowhere import *\nlr", {"lr"}),
    ],
)  # fmt: skip
def test_it_takes_the_names_that_it_reads_before_it_binds_them(body, names):
    assert captured(body, **EVERYTHING) == names


def test_what_ipython_put_into_the_namespace_stays_there():
    opener = object()
    namespace = {
        "In": [""], "Out": {}, "_": 1, "__": 1, "_i": "", "_i12": "", "_12": 1, "_oh": {},
        "_dh": [], "get_ipython": 1, "exit": 1, "quit": 1, "__builtins__": {}, "__name__": "",
        "open": opener, "lr": 0.1, "_private": 2, "__data": 3,
    }  # fmt: skip
    mine = users_names(namespace, {"open": opener})
    assert mine == {"lr": 0.1, "_private": 2, "__data": 3}
    assert users_names({"open": len}, {"open": open}) == {"open": len}  # the user's own


# -- how it runs -------------------------------------------------------------------------------


def test_it_runs_as_a_cell_does_and_gives_its_last_expression():
    body = """
        from dataclasses import dataclass

        @dataclass
        class Point:
            x: int

        def fact(n):
            return 1 if n < 2 else n * fact(n - 1)

        points = [Point(fact(n) * scale) for n in range(4)]
        class Box:
            def __len__(self):
                return len(points)
        (__name__, [p.x for p in points], len(Box()))
    """
    assert sent(cell(body, {"scale": 10}))() == ("__main__", [10, 10, 20, 60], 4)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("1 + 1", 2),
        ("1 + 1;", None),
        ("1 + 1;  # quiet\n\n", None),
        ("';'", ";"),
        ("if True:\n    3", None),
        ("from __future__ import annotations\nx: nothing = 1\nx", 1),
        ("(7\n  % 4)", 3),  # within an expression a percent sign is Python's
        ("'''\n!ls\n%time\n'''", "\n!ls\n%time\n"),
    ],
)
def test_its_value_is_the_last_expression_without_a_semicolon(body, value):
    assert cell(body)() == value


def test_a_run_changes_nothing_in_the_notebook_whose_functions_see_what_the_cell_assigns():
    notebook = {"__name__": "__main__", "x": 1}
    function = cell("seen = 'y' in globals()\nx, y = x + 1, 1\nseen", notebook, home=notebook)
    assert [each() for each in (function, function, sent(function))] == [False] * 3
    assert notebook["x"] == 1
    exec("lr = 0.1\ndef rate():\n    return lr", notebook)
    function = sent(cell("before = rate()\nlr = 0.2\n(before, rate())", notebook, home=notebook))
    assert function() == (0.1, 0.2)


@pytest.mark.slow
def test_a_machine_without_ipython_runs_it_with_submodules_that_an_earlier_cell_has_imported():
    body = """
        import sys

        def fault():
            return [nb.chaos.Fault.__name__ for _ in "a"][0]

        tree = xml.dom.minidom.parseString("<a/>")
        "IPython" in sys.modules, tree.documentElement.tagName, fault()
    """
    data = cloudpickle.dumps(cell(body, {"xml": xml, "nb": nbelastic}))
    code = f"import cloudpickle; print(cloudpickle.loads({data!r})())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "(False, 'a', 'Fault')"


# -- lines and errors --------------------------------------------------------------------------


def test_an_error_of_a_rank_has_the_cells_lines_and_numbers_and_no_other_frames():
    body = "def train():\n    loss = 1\n    return loss / nothing\n\ntrain()\n"
    function = sent(cell(body, {"nothing": 0}))
    linecache.cache.pop("Cell In[5]")
    with pytest.raises(ZeroDivisionError) as caught:
        function()
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # this test's own frame
    lines = [line.strip() for line in unpack_error(pack_error(caught.value)).where().splitlines()]
    assert [line for line in lines if set(line) - set("~^")] == [
        'File "Cell In[5]", line 6, in <module>',
        "train()",
        'File "Cell In[5]", line 4, in train',
        "return loss / nothing",
    ]


@pytest.mark.parametrize("line", ["%matplotlib inline", "    %time f()", "files = !ls", "Net?"])
def test_a_line_for_ipython_is_refused_with_its_number(line):
    body = f"if True:\n    pass\n{line}\n"
    with pytest.raises(CellError, match=r"Cell In\[5\], line 4: .*for IPython"):
        cell(body)
    with pytest.raises(CellError, match="no code"):
        cell("\n# nothing yet\n")


# -- what comes back ---------------------------------------------------------------------------


def test_a_value_that_cannot_be_pickled_or_unpickled_gets_a_placeholder():
    value = sent(pack(threading.Lock()))
    assert isinstance(value, ReturnedValue)
    assert repr(value).startswith("<unlocked _thread.lock object")
    assert "cannot be pickled" in str(value)

    class Shy:
        def __repr__(self):
            raise RuntimeError("don't look")

    assert type(sent(pack(Shy()))).__name__ == "Shy"
    module = types.ModuleType("only_there")
    exec("class Thing:\n    def __repr__(self):\n        return 'a thing'", module.__dict__)
    sys.modules["only_there"] = module
    try:
        data = cloudpickle.dumps(pack(module.Thing()))
    finally:
        del sys.modules["only_there"]
    value = cloudpickle.loads(data)
    assert repr(value).startswith("a thing\n")
    assert "cannot be unpickled here (ModuleNotFoundError" in value.reason
