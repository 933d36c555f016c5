"""A script in a rank: its arguments, modules, exit code, signals and files."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from nbelastic.cli.script import (
    ScriptCall,
    ScriptExit,
    bundle,
    bundle_of,
    rank,
    run_script,
    script_command,
)
from nbelastic.cli.script.rank import mark_of
from nbelastic.cluster.rank_error import pack_error
from nbelastic.errors import OptionError

from .commands import ROOT


@pytest.fixture
def folder(tmp_path) -> Path:
    place = tmp_path / "project"
    place.mkdir()
    (place / "helper.py").write_text("calls = []\n")
    return place


@pytest.fixture(autouse=True)
def worker(tmp_path, monkeypatch) -> Path:
    """A worker's directory, and a process that is as before."""
    place = tmp_path / "worker"
    place.mkdir()
    monkeypatch.setattr(rank, "get_worker", lambda: SimpleNamespace(local_directory=str(place)))
    monkeypatch.chdir(tmp_path)
    before = list(sys.argv), dict(os.environ)
    yield place
    assert not [path for path in sys.path if path.endswith(("project", "/cli/alias"))]
    sys.argv[:] = before[0]
    for name in set(os.environ) - set(before[1]):
        del os.environ[name]


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def call(path: Path, *arguments: str, **more) -> ScriptCall:
    command = script_command(["python", str(path), *arguments], os.getcwd())
    return ScriptCall(command, more.pop("cwd", os.getcwd()), mark_of(command.file), **more)


def in_thread(function) -> BaseException | None:
    """Run a function as a rank does, in a thread; return what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


# -- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "script", "module", "arguments"),
    [
        ("python train.py --lr 1", "train.py", "", ("--lr", "1")),
        ("python3.11 -u train.py", "train.py", "", ()),
        ("/usr/bin/python train.py -m", "train.py", "", ("-m",)),
        ("train.py x", "train.py", "", ("x",)),
        ("python -m pkg.train x", "", "pkg.train", ("x",)),
    ],
)
def test_a_command_names_a_script_or_a_module(folder, words, script, module, arguments):
    (folder / "train.py").touch()
    found = script_command(words.split(), str(folder))
    assert found.script == (str(folder / script) if script else "")
    assert (found.module, found.arguments, found.folder) == (module, arguments, str(folder))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "a command is missing"),
        ("python", "a script is missing"),
        ("python -c pass", "'-c': this option of Python cannot be used"),
        ("python gone.py", "there is no such script"),
        ("notes.txt", "must be a Python script"),
        ("python -m", "the name of a module must follow"),
    ],
)
def test_another_command_is_refused_by_name(folder, words, says):
    (folder / "notes.txt").write_text("x")
    with pytest.raises(OptionError, match=says):
        script_command(words.split(), str(folder))


# -- running -------------------------------------------------------------------------------------


def test_a_script_runs_as_main_with_its_arguments_and_folder(folder, tmp_path):
    path = script(
        folder,
        "import os, sys, helper\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].__file__ == __file__\n"
        "with open(sys.argv[1], 'w') as out:\n"
        "    print(sys.argv[2:], os.getcwd(), os.environ['COLOUR'], file=out)\n",
    )
    run_script(call(path, "out.txt", "--lr", "1", variables={"COLOUR": "red"}))
    assert (tmp_path / "out.txt").read_text() == f"['--lr', '1'] {tmp_path} red\n"
    assert "helper" not in sys.modules


def test_a_module_runs_as_main(folder, tmp_path, monkeypatch):
    (folder / "pkg").mkdir()
    script(folder / "pkg", "", "__init__.py")
    script(
        folder / "pkg",
        "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(__name__)",
        "train.py",
    )
    monkeypatch.chdir(folder)
    command = script_command(["python", "-m", "pkg.train", "out.txt"], str(folder))
    run_script(ScriptCall(command, str(folder)))
    assert (folder / "out.txt").read_text() == "__main__"
    assert "pkg" not in sys.modules


@pytest.mark.parametrize("text", ["sys.exit()", "sys.exit(0)", "exit_ = sys.exit; exit_(None)"])
def test_an_exit_with_0_is_success(folder, text):
    run_script(call(script(folder, f"import sys\n{text}\n")))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sys.exit(3)", "train.py exited with code 3"),
        ("sys.exit('no data')", "train.py exited: no data"),
    ],
)
def test_an_exit_with_another_code_is_a_failure(folder, text, says):
    with pytest.raises(ScriptExit, match=says):
        run_script(call(script(folder, f"import sys\n{text}\n")))


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("import sys\nsys.exit(3)", ["sys.exit(3)"]),
        (
            "import sys\ndef end():\n    sys.exit('no data')\nend()",
            ["end()", "sys.exit('no data')"],
        ),
        ("def (:", []),  # the message of a SyntaxError has the place
        ("print('a')\0", []),
    ],
)
def test_an_error_of_a_script_has_its_own_lines_alone(folder, text, lines):
    error = in_thread(lambda: run_script(call(script(folder, text))))
    frames = [frame for frame in pack_error(error).frames if frame.file != __file__]
    assert [frame.text for frame in frames] == lines


def test_an_error_has_the_lines_of_the_script_alone(folder):
    path = script(folder, "def f():\n    raise KeyError('x')\nf()\n")
    with pytest.raises(KeyError) as caught:
        run_script(call(path))
    files = [str(entry.path) for entry in caught.traceback]
    assert files[-2:] == [str(path), str(path)]
    assert not any("runpy" in file for file in files)


def test_a_second_start_behaves_as_the_first(folder):
    path = script(folder, "import helper\nhelper.calls.append(1)\nassert len(helper.calls) == 1\n")
    for _ in range(2):
        run_script(call(path))


def test_a_second_script_at_the_same_time_is_refused(folder):
    path = script(folder, "import run_another\n")
    script(folder, "import sys; sys.another()\n", "run_another.py")
    raised = []
    sys.another = lambda: raised.append(in_thread(lambda: run_script(call(path))))
    try:
        run_script(call(path))
    finally:
        del sys.another
    assert "processes of their own" in str(raised[0])


def test_a_signal_handler_in_a_thread_is_a_warning(folder, monkeypatch):
    warnings = []
    monkeypatch.setattr(rank, "current", lambda: None)
    monkeypatch.setattr(rank, "warn", lambda _, text: warnings.append(text))
    path = script(
        folder,
        "import signal\nfor _ in range(2):\n    signal.signal(signal.SIGTERM, lambda *_: None)\n",
    )
    before, original = signal.getsignal(signal.SIGTERM), signal.signal
    assert in_thread(lambda: run_script(call(path))) is None
    assert len(warnings) == 1 and warnings[0].startswith("signal.signal was ignored")
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.signal is original


def test_exit_handlers_of_a_script_run_at_its_end(folder, tmp_path):
    path = script(
        folder,
        "import atexit\n"
        "def note(word):\n"
        "    with open('order', 'a') as out: out.write(word)\n"
        "def first(): note('first ')\n"
        "def bad(): raise ValueError('shown, and the others are called')\n"
        "atexit.register(first)\n"
        "atexit.register(bad)\n"
        "atexit.register(lambda: note('last '))\n",
    )
    original = atexit.register
    run_script(call(path))
    assert (tmp_path / "order").read_text() == "last first "
    assert atexit.register is original


def test_an_exit_handler_that_exits_changes_nothing(folder):
    text = "import atexit, sys\ndef leave(): sys.exit(3)\natexit.register(leave)\n"
    run_script(call(script(folder, text)))


@pytest.mark.parametrize("text", ["signal.alarm(600)", "signal.setitimer(signal.ITIMER_REAL, 600)"])
def test_an_alarm_in_a_thread_is_a_warning_and_does_not_end_the_worker(folder, monkeypatch, text):
    warnings: list[str] = []
    alarms: list[float] = []
    monkeypatch.setattr(rank, "current", lambda: None)
    monkeypatch.setattr(rank, "warn", lambda _, text: warnings.append(text))
    for name in ("alarm", "setitimer"):
        monkeypatch.setattr(signal, name, lambda *seconds: alarms.append(seconds[-1]))
    before = signal.alarm, signal.setitimer
    path = script(folder, f"import signal\n{text}\n")
    assert in_thread(lambda: run_script(call(path))) is None
    assert not alarms and len(warnings) == 1 and "signal.alarm" in warnings[0]
    assert (signal.alarm, signal.setitimer) == before


@pytest.mark.parametrize("place", ["/", str(Path(os.__file__).parents[2]), str(ROOT)])
def test_modules_of_python_and_of_the_worker_are_not_the_scripts(place, folder):
    """A script may lie in the root directory, beside Python, or beside this package."""
    for name in ("threading", "logging", "nbelastic.cli", "dask.config", "distributed"):
        assert not rank._lies_in(sys.modules[name], place), name
    assert rank._lies_in(SimpleNamespace(__file__=str(folder / "helper.py")), "/")


def test_a_link_to_a_script_imports_what_is_beside_the_script(folder, tmp_path):
    script(folder, "import helper\n")
    links = tmp_path / "bin"
    links.mkdir()
    (links / "train.py").symlink_to(Path("..") / "project" / "train.py")
    run_script(call(links / "train.py"))


SPAWNS = """
import horovod
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return len(horovod.__name__) + index

if __name__ == "__main__":
    loader = DataLoader(Samples(), num_workers=1, multiprocessing_context="spawn")
    assert [int(each) for each in loader] == [7, 8, 9, 10]
"""


def test_a_data_loader_may_spawn_its_processes(folder):
    """They import the script, and find what it finds."""
    path = script(folder, SPAWNS)
    assert in_thread(lambda: run_script(call(path))) is None


# -- horovod -------------------------------------------------------------------------------------

IMPORTS = """
import horovod, sys
import horovod.torch as hvd
import horovod.torch.elastic
import nbelastic.torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
from horovod.torch.mpi_ops import synchronize
assert hvd.elastic.run is nbelastic.torch.elastic.run
assert horovod.torch.allreduce is nbelastic.torch.allreduce
assert ElasticSampler is nbelastic.torch.elastic.ElasticSampler
assert hvd.nccl_built() == 0
from horovod.torch.mpi_ops import join
hvd.init()
assert join() == 0
assert hvd.ProcessSet([0]).ranks == [0]
hvd.shutdown()
"""


def test_horovods_names_find_nbelastic(folder):
    run_script(call(script(folder, IMPORTS)))
    assert not [name for name in sys.modules if name.partition(".")[0] == "horovod"]
    assert not [finder for finder in sys.meta_path if "Alias" in type(finder).__name__]


@pytest.mark.parametrize(
    "line", ["import horovod.tensorflow.keras as hvd", "from horovod.tensorflow import elastic"]
)
def test_a_missing_module_of_horovod_says_what_to_use(folder, line):
    says = "'horovod.tensorflow': nbelastic stands in for Horovod.*Use horovod.torch"
    with pytest.raises(ModuleNotFoundError, match=says) as caught:
        run_script(call(script(folder, line)))
    assert caught.value.name == "horovod.tensorflow"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("from horovod import run; run(print, np=2)", r"horovod.run starts a job.*nbelastic.fit"),
        ("import horovod; horovod.runner.run(print)", r"horovod.runner.run starts a job"),
    ],
)
def test_a_missing_function_of_horovod_says_what_to_do(folder, line, says):
    with pytest.raises(NotImplementedError, match=says):
        run_script(call(script(folder, line)))


def test_an_installed_horovod_comes_first(folder, tmp_path, monkeypatch):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = script(
        folder, "import horovod, sys\nassert hasattr(horovod, 'real') == ('real' in sys.argv)\n"
    )
    for alias, words in ((None, ["real"]), (False, ["real"]), (True, [])):
        run_script(call(path, *words, alias=alias))
        sys.modules.pop("horovod", None)


def test_without_the_alias_horovod_is_missing(folder):
    with pytest.raises(ModuleNotFoundError, match="horovod"):
        run_script(call(script(folder, "import horovod.torch\n"), alias=False))


# -- files ---------------------------------------------------------------------------------------


def moved(given: ScriptCall, packed: bytes, folder: Path) -> ScriptCall:
    """Return a call as a worker gets it that does not see the script's file."""
    folder.rename(folder.with_name("away"))
    return ScriptCall(given.command, given.cwd, given.mark, packed)


def test_a_worker_without_the_folder_unpacks_it_and_leaves_nothing(folder, worker):
    path = script(folder, "import helper, os\nassert 'helper.py' in os.listdir()\n")
    given = call(path, cwd=str(folder))
    run_script(moved(given, bundle_of(str(folder)).packed, folder))
    assert os.listdir(worker) == []
    assert "helper" not in sys.modules


def test_a_worker_that_sees_the_folder_uses_it(folder, worker):
    path = script(folder, "import os\nopen('here', 'w').close()\n")
    given = call(path, cwd=str(folder), packed=bundle_of(str(folder)).packed)
    run_script(given)
    assert (folder / "here").exists()


def test_without_a_bundle_a_missing_folder_is_an_error_that_says_so(folder):
    given = call(script(folder, "pass\n"))
    with pytest.raises(FileNotFoundError, match="without --shared-fs it is sent"):
        run_script(ScriptCall(moved(given, b"", folder).command, given.cwd, given.mark))


def test_a_bundle_leaves_out_what_is_ignored_and_says_so(folder):
    (folder / ".gitignore").write_text("data/\n*.log\n")
    for name in ("data", "__pycache__", "pkg", "env"):
        (folder / name).mkdir()
        (folder / name / "x.py").write_text("1\n")
    (folder / "env" / "pyvenv.cfg").touch()
    (folder / "a.log").write_text("x")
    found = bundle_of(str(folder))
    assert found.files == 3  # .gitignore, helper.py, pkg/x.py
    assert set(found.ignored) == {"data/", "a.log"}
    assert "a .gitignore excludes" in found.describe("project")


def test_a_script_travels_whatever_a_gitignore_says(folder, worker):
    (folder / ".gitignore").write_text("*_local.py\n")
    path = script(folder, "import helper\n", "train_local.py")
    packed = bundle_of(str(folder), str(path))
    assert packed.ignored == ()
    run_script(moved(call(path), packed.packed, folder))


def test_a_file_that_cannot_travel_is_named(folder, monkeypatch):
    odd = os.fsdecode(os.path.join(os.fsencode(folder), b"caf\xe9.txt"))
    Path(odd).write_text("x")
    with pytest.raises(OptionError, match=r"caf\\udce9.txt.*UTF-8"):
        bundle_of(str(folder))
    os.remove(odd)
    (folder / "secret.key").write_text("x")
    write = zipfile.ZipFile.write

    def refuse(file, path, *rest):
        if path.endswith(".key"):
            raise PermissionError(13, "Permission denied", path)
        write(file, path, *rest)

    monkeypatch.setattr(zipfile.ZipFile, "write", refuse)
    with pytest.raises(OptionError, match=r"secret.key: Permission denied.*\.gitignore"):
        bundle_of(str(folder))


def test_a_file_that_vanishes_while_the_folder_is_packed_does_not_travel(folder, monkeypatch):
    gone = script(folder, "", "temporary")
    size = os.path.getsize

    def vanish(path):
        found = size(path)
        if path == str(gone):
            gone.unlink()
        return found

    monkeypatch.setattr(os.path, "getsize", vanish)
    assert bundle_of(str(folder)).files == 1


def test_a_script_that_cannot_be_read_is_refused(folder, monkeypatch):
    path = script(folder, "")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OptionError, match="cannot be read"):
        script_command([str(path)], str(folder))


def test_a_folder_that_is_too_large_is_refused_with_its_largest_parts(folder, monkeypatch):
    monkeypatch.setattr(bundle, "MOST_BYTES", 2**20)
    (folder / "data").mkdir()
    (folder / "data" / "x.bin").write_bytes(b"x" * 2**21)
    with pytest.raises(
        OptionError, match=r"largest: data \(2.0 MiB\).*\.gitignore, or use --shared-fs"
    ):
        bundle_of(str(folder))
