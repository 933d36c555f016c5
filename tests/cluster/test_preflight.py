"""What is checked before a job begins, and what travels with it: a function, its modules."""

import asyncio
import contextlib
import importlib.machinery
import pickle
import subprocess
import sys
import textwrap
import traceback
from types import SimpleNamespace
from unittest.mock import patch

import cloudpickle
import pytest
from distributed import Future
from distributed.comm import CommClosedError

from nbelastic.cluster.kernel import preflight, sources
from nbelastic.cluster.kernel.preflight import check_versions, pack_function
from nbelastic.cluster.kernel.sources import GitIgnore, collect
from nbelastic.cluster.payload import install
from nbelastic.cluster.wire import versions
from nbelastic.errors import NotPicklable, VersionMismatch
from nbelastic.messages import CodeLine, PackedError

HERE = versions()


class FakeClient:
    """A cluster of which each worker gives one answer; None: it gives none."""

    def __init__(self, **answers):
        self.answers = answers

    def run_on_scheduler(self, function):
        takes_none = function.__code__.co_argcount == 0
        return HERE if takes_none else list(self.answers)

    def sync(self, function, *arguments):
        return asyncio.run(function(*arguments))

    async def _run(self, _function, *, workers, on_error):
        assert on_error == "return"
        (address,) = workers
        answer = self.answers[address]
        if answer is None:
            await asyncio.sleep(60)
        return {address: answer}


def test_each_difference_is_told_and_a_worker_that_is_dying_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(preflight, "ANSWER_TIMEOUT", 0.05)
    answers = {"a": HERE, "dying": CommClosedError("connection reset by peer"), "frozen": None}
    check_versions(FakeClient(**answers))
    answers |= {"b": {**HERE, "torch": "1.0", "python": "2.7"}, "odd": ImportError("no module")}
    with pytest.raises(VersionMismatch) as caught:
        check_versions(FakeClient(**answers))
    b, torch, odd = str(caught.value).splitlines()[1:4]
    assert b.startswith("  b has python 2.7") and torch.startswith("  b has torch 1.0")
    assert odd.startswith("  odd could not be asked: ImportError('no module')")


# -- what a function is called with ----------------------------------------------------------------


class Promise(Future):
    """A future of no client."""

    __hash__ = object.__hash__
    __init__ = __del__ = lambda self: None


promise = Promise()


def make_closure():
    outer = [promise]
    return lambda: outer


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "where"),
    [
        (print, (1, promise), {}, r"^args\[1\]"),
        (print, (), {"data": [1, {"of": {promise}}]}, "^the argument 'data'"),
        (make_closure(), (), {}, r"^the variable 'outer' that <lambda>\(\) uses"),
        (lambda data=promise: data, (), {}, "^the default of 'data'"),
    ],
)
def test_a_future_is_refused_by_name(function, args, kwargs, where):
    with pytest.raises(NotPicklable, match=where + r" is or has a Dask Future.*result\(\)"):
        pack_function(function, args, kwargs)


def test_functions_that_cannot_be_looked_into_travel_all_the_same():
    def outer():
        def inner():
            return late

        packed = pack_function(inner, (list(range(100_000)),), {})
        late = 1
        return packed, late

    packed, _ = outer()
    assert callable(pickle.loads(packed[0].call)[0])


# -- where an error of a rank was raised ----------------------------------------------------------

USERS = "/home/me/train.py"


def test_the_place_of_an_error_is_the_users_line():
    def place(*files):
        packed = PackedError("", tuple(CodeLine(file, 1, "f", "") for file in files), b"")
        return packed.place.file if packed.place else None

    for theirs in (
        "/opt/venv/lib/python3.11/site-packages/torch/autograd/function.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "/usr/lib/python3.11/contextlib.py",
        r"C:\Python311\Lib\site-packages\torch\nn.py",
    ):
        assert place("/home/me/a.py", theirs, USERS, theirs) == USERS
        assert place(theirs, "<ipython-input-3>", theirs) == "<ipython-input-3>", "a cell"
        assert place(theirs) == theirs, "there is no other"
    assert place() is None


# -- modules of a user's own ----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The notebook's folder: on the path, and forgotten at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with patch.dict(sys.modules):
        yield tmp_path


def write(folder, **files):
    for name, text in files.items():
        path = folder / (name.replace("__", "/").replace("INIT", "__init__") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


@contextlib.contextmanager
def installed(folder, modules):
    """Import as a rank elsewhere does: with the modules that travel, and without the folder."""
    tops = {name.partition(".")[0] for name in modules.sources}
    left = {name: each for name, each in sys.modules.items() if name.partition(".")[0] not in tops}
    path = [each for each in sys.path if each != str(folder)]
    with (
        patch.dict(sys.modules, left, clear=True),
        patch.object(sys, "meta_path", list(sys.meta_path)),
        patch.object(sys, "path", path),
    ):
        install(modules)
        yield


def run(folder, code, names):
    """Return the value of code in a rank elsewhere."""
    travelled, namespace = collect(names), {}
    with installed(folder, travelled):
        exec(code, namespace)
        return namespace["value"]


def test_what_is_not_installed_travels_with_all_that_it_imports(folder):
    write(
        folder,
        helpers="import torch, os\nfrom deeper import x\ndef lazy():\n    import late\n",
        deeper="x = 1",
        late="y = 2",
        unused="z = 3",
        mypkg__INIT="",
        mypkg__inner__leaf="from . import sibling",
        mypkg__inner__sibling="",
    )
    assert set(collect({"helpers"}).sources) == {"helpers", "deeper", "late"}
    found = collect({"mypkg.inner.leaf", "torch", "json", "nbelastic.cluster", "nowhere"})
    assert set(found.sources) == {"mypkg", "mypkg.inner", "mypkg.inner.leaf", "mypkg.inner.sibling"}


def test_a_function_names_its_modules_however_it_uses_them(folder):
    write(folder, one="class A: pass", two="def f(): pass", three="", four="", five="def g(): pass")
    import one
    import two

    scope = {"made": one.A(), "f": two.f}
    exec(
        "import three\ndef train():\n    made, f, three\n    def inner():\n        import four",
        scope,
    )
    _, names = sources.dumps_noting((scope["train"], (), {"kind": one.A}))
    assert {"one", "two", "three", "four"} <= set(collect(names).sources)
    assert "five" not in collect(names).sources
    assert set(pack_function(two.f, (), {})[1].sources) == {"two"}


@pytest.mark.parametrize("reached_by", ["import pkg.a.b", "import os\nfrom pkg.a import b"])
def test_packages_relative_and_lazy_imports_work_elsewhere(folder, reached_by):
    write(
        folder,
        pkg__INIT="from .a.b import value as top\n__all__ = ['top']",
        pkg__a__INIT="",
        pkg__a__b="from ..c import base\nvalue = base + 1\ndef lazy():\n    from . import d\n    "
        "import importlib\n    return d.more, importlib.import_module('pkg.dyn').value",
        pkg__a__d="more = 7",
        pkg__c="from space.deep import one\nbase = one",
        pkg__dyn="value = __name__, __package__",
        space__deep="one = 1",
    )
    code = f"{reached_by}\nimport pkg, pkg.a.b as module\nvalue = pkg.top, module.lazy()"
    assert run(folder, code, {"pkg"}) == (2, (7, ("pkg.dyn", "pkg")))


def test_what_travels_comes_before_what_the_worker_has(folder):
    write(folder, helpers="value = 'sent'")
    travelled = collect({"helpers"})
    write(folder, helpers="value = 'of the worker'")
    with installed(folder, travelled), patch.object(sys, "path", [str(folder), *sys.path]):
        import helpers

        assert helpers.value == "sent"


def test_a_result_is_of_the_kernels_class_and_a_traceback_shows_the_lines_that_ran(folder):
    """Those that were on disk at the start, whatever this process had imported before."""
    write(folder, helpers="class Thing:\n    pass\ndef fail():\n    pass\n")
    import helpers

    write(folder, helpers="class Thing:\n    pass\ndef fail():\n    return missing_then\n")
    payload, travelled = pack_function(helpers.Thing, (), {})
    arrived = pickle.loads(payload.modules)
    assert arrived == travelled
    with installed(folder, arrived):
        function, args, kwargs = cloudpickle.loads(payload.call)
        assert function is not helpers.Thing
        result = cloudpickle.dumps(function(*args, **kwargs))
        write(folder, helpers="class Thing:\n    pass\ndef fail():\n    return edited_since\n")
        with pytest.raises(NameError) as caught:
            sys.modules["helpers"].fail()
        shown = traceback.extract_tb(caught.value.__traceback__)[-1]
        assert (shown.filename, shown.line) == (helpers.__file__, "return missing_then")
    assert type(pickle.loads(result)) is helpers.Thing


def test_what_is_installed_from_its_own_folder_stays(folder, monkeypatch):
    write(folder, one="", two="", three="")
    info = folder / "one-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: one\nVersion: 1\n")
    (info / "direct_url.json").write_text('{"url": "", "dir_info": {"editable": true}}')
    finder = SimpleNamespace(MAPPING={"two": str(folder / "two.py")})  # as setuptools has it
    monkeypatch.setitem(sys.modules, "__editable___two_finder", finder)
    assert set(collect({"one", "two", "three"}).sources) == {"three"}


def test_a_directory_of_data_is_no_package(folder, monkeypatch):
    write(folder, data__tool="", mypkg__INIT="", mypkg__tool="", mypkg__images__a="")
    monkeypatch.setattr(sources, "MOST_ENTRIES", 2)
    for number in range(4):
        (folder / "data" / f"{number}.png").write_bytes(b"")
        (folder / "mypkg" / "images" / f"{number}.png").write_bytes(b"")
    assert set(collect({"data", "mypkg"}).sources) == {"mypkg", "mypkg.tool"}


def test_what_cannot_travel_is_left_out_with_its_reason(folder, monkeypatch):
    write(folder, hidden="x = 1", pkg__INIT="", pkg__secret="", pkg__open="", big="x = 1\n" * 99)
    write(folder, fast__INIT="", also="x = 1\n" * 10, more="x = 1\n" * 10)
    (folder / "fast" / f"core{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    (folder / ".gitignore").write_text("hidden.py\nsecret.py\n")
    monkeypatch.setattr(sources, "MOST_BYTES", 100)
    found = collect({"hidden", "pkg", "fast", "big", "also", "more"})
    assert set(found.sources) == {"also", "pkg", "pkg.open"}
    assert "compiled" in found.left_out["fast"]
    assert "MiB" in found.left_out["big"] and "MiB" in found.left_out["more"]
    said = found.describe()
    assert "pkg (0.0 KiB)" in said and "left out: hidden, a .gitignore excludes it" in said


def test_a_folder_that_is_excluded_itself_is_one_of_its_own(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("*\n")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / ".gitignore").write_text("mine.py\n")
    git = GitIgnore(str(tmp_path / "work"))
    assert git.excludes(str(tmp_path / "work" / "mine.py"), directory=False)
    assert not git.excludes(str(tmp_path / "work" / "yours.py"), directory=False)


GITIGNORE = """
# a comment
*.log
!keep.log
/top.py
build/
docs/**/gen.py
a[0-9].py
**/deep.py
sub/*.txt
trailing.py\x20
!
\\#odd.py
"""


PATHS = [
    *("x.log", "keep.log", "d/x.log", "d/keep.log", "top.py", "d/top.py"),
    *("build/x.py", "d/build/x.py", "docs/gen.py", "docs/u/v/gen.py", "gen.py"),
    *("a1.py", "ab.py", "d/e/deep.py", "sub/x.txt", "sub/d/x.txt", "trailing.py", "#odd.py"),
    *("nested/mine.py", "nested/x.log", "nested/d/mine.py"),
]


@pytest.mark.slow
def test_a_gitignore_means_what_it_means_to_git(tmp_path):
    (tmp_path / ".gitignore").write_text(GITIGNORE)
    for path in PATHS:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    (tmp_path / "nested" / ".gitignore").write_text("mine.py\n!x.log\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    words = ["git", "check-ignore", "--no-index", *PATHS]
    git = subprocess.run(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    ours = GitIgnore(str(tmp_path))
    excluded = [each for each in PATHS if ours.excludes(str(tmp_path / each), directory=False)]
    assert excluded == git.stdout.splitlines()
    below = GitIgnore(str(tmp_path / "d"))  # files above it count, too
    assert below.excludes(str(tmp_path / "d" / "x.log"), directory=False)
