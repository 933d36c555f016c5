"""A script in a rank: its arguments, modules, exit code, signals and files."""

from __future__ import annotations

import io
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from nbelastic.cli.script import bundle
from nbelastic.cli.script.bundle import ScriptCall, bundle_of, mark_of, script_call
from nbelastic.cli.script.rank import run_script
from nbelastic.errors import OptionError, RankFailed
from tests.support.clusters import Crew


@pytest.fixture
def folder(tmp_path) -> Path:
    place = tmp_path / "project"
    place.mkdir()
    (place / "helper.py").write_text("calls = []\n")
    return place


class Stage:
    """Runs scripts as the one rank of a job on a real worker."""

    def __init__(self, crew: Crew, folder: Path) -> None:
        self.crew, self.folder = crew, folder
        self.output = ""

    def call(self, text: str, *arguments: str, name: str = "train.py", **more) -> ScriptCall:
        """Write a script; return the call of it in the folder's parent."""
        cwd = str(more.pop("cwd", self.folder.parent))
        words = ["python", str(script(self.folder, text, name)), *arguments]
        call = script_call(words, cwd)
        return replace(call, mark=mark_of(call.file), **more)

    def run(self, text: str | ScriptCall, *arguments: str, **more) -> None:
        """Run a script to the end of its job, which raises if it fails."""
        given = text if isinstance(text, ScriptCall) else self.call(text, *arguments, **more)
        job = self.crew.fit(run_script, args=[given], np=1, block=False)
        try:
            job.results(60)
        finally:
            self.output = job.logs(0)

    def wait(self) -> None:
        """Wait until the process of the last rank has ended."""
        self.crew.wait_until_whole(4)


@pytest.fixture
def stage(crew: Crew, folder: Path) -> Stage:
    return Stage(crew, folder)


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# -- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "script", "module", "arguments"),
    [
        ("python train.py --lr 1", "train.py", "", ("--lr", "1")),
        ("python3.11 -u train.py", "train.py", "", ()),
        ("/usr/bin/python train.py -m", "train.py", "", ("-m",)),
        ("train.py x", "train.py", "", ("x",)),
        ("python -m pkg.train x", "", "pkg.train", ("x",)),
        ("bin/link.py", "train.py", "", ()),  # which imports what is beside the script
    ],
)
def test_a_command_names_a_script_or_a_module(folder, words, script, module, arguments):
    (folder / "train.py").touch()
    (folder / "bin").mkdir()
    (folder / "bin" / "link.py").symlink_to(Path("..") / "train.py")
    found = script_call(words.split(), str(folder))
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
        ("python secret.py", "cannot be read"),
    ],
)
def test_another_command_is_refused_by_name(folder, monkeypatch, words, says):
    (folder / "notes.txt").write_text("x")
    (folder / "secret.py").touch()
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, *mode: "secret" not in path and access(path, *mode)
    )
    with pytest.raises(OptionError, match=says):
        script_call(words.split(), str(folder))


# -- running -------------------------------------------------------------------------------------


def test_a_script_runs_as_main_with_its_arguments_and_folder(stage, tmp_path):
    text = (
        "import os, sys, helper\n"
        "helper.calls.append(1)\n"
        "assert len(helper.calls) == 1\n"  # also in a second start
        "main = sys.modules['__main__']\n"
        "assert __name__ == '__main__' and vars(main) is globals()\n"
        "assert __spec__ is None and __package__ is None and __file__ == sys.argv[0]\n"
        "with open(sys.argv[1], 'w') as out:\n"
        "    print(sys.argv[2:], os.getcwd(), file=out)\n"
    )
    for _ in range(2):
        stage.run(text, "out.txt", "--lr", "1")
    assert (tmp_path / "out.txt").read_text() == f"['--lr', '1'] {tmp_path}\n"


@pytest.mark.parametrize("name", ["train", "__main__"])
def test_a_module_runs_as_main(stage, folder, name):
    package = folder / "pkg"
    package.mkdir()
    script(package, "", "__init__.py")
    text = "import sys, pathlib\nfrom . import __name__ as ours\nassert sys.argv[0] == __file__\n"
    text += "pathlib.Path(sys.argv[1]).write_text(f'{__name__} {ours} {__spec__.name}')"
    script(package, text, f"{name}.py")
    module = "pkg" if name == "__main__" else f"pkg.{name}"
    stage.run(script_call(["python", "-m", module, "out.txt"], str(folder)))
    assert (folder / "out.txt").read_text() == f"__main__ pkg pkg.{name}"


@pytest.mark.parametrize("module", ["gone", "helper.gone", "sys"])
def test_a_module_that_cannot_be_run_is_named(stage, folder, module):
    with pytest.raises(ModuleNotFoundError, match=f"ModuleNotFoundError: .*'{module}'"):
        stage.run(script_call(["python", "-m", module], str(folder)))


@pytest.mark.parametrize(
    ("text", "says", "lines"),
    [
        ("import sys\nsys.exit(3)", "train.py exited with code 3", ["sys.exit(3)"]),
        ("def end():\n    exit('no data')\nend()", "train.py exited: no data", ["exit('no data')"]),
        ("def f():\n    raise KeyError('x')\nf()", "KeyError: 'x'", ["f()", "raise KeyError('x')"]),
        ("print('a')\0", "null bytes", []),
    ],
)
def test_an_error_of_a_script_has_its_own_lines_alone(stage, text, says, lines):
    with pytest.raises(RankFailed, match=says) as caught:
        stage.run(text)
    shown = str(caught.value)
    assert [line for line in lines if line not in shown] == []
    assert "nbelastic/cli" not in shown and "importlib" not in shown


ENDS = """
import atexit, pickle, threading
class Net: pass
def note(word):
    with open('order', 'a') as out: out.write(word)
def save():
    pickle.dumps(Net())  # by the name of its class in __main__
    note('saved ')
def bad(): raise ValueError('shown, and the others are called')
atexit.register(save)
atexit.register(bad)
atexit.register(note, 'last ')
threading.Timer(0.2, note, ['thread ']).start()
note('script ')
raise SystemExit
"""


def test_exit_handlers_and_threads_of_a_script_end_as_those_of_a_process(stage, tmp_path):
    stage.run(ENDS)
    stage.wait()
    assert (tmp_path / "order").read_text() == "script thread last saved "


FORKS = """
import os, sys
ends = {"pass": 0, "sys.exit(3)": 3, "sys.exit('bad')": 1, "1 / 0": 1, "os._exit(4)": 4}
for text, code in ends.items():
    pid = os.fork()
    if not pid:
        exec(text)
        break
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == code, (text, status)
else:
    print("parent")
"""


MANY = """
import multiprocessing, sys

def double(number):
    return 2 * number

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(1) as pool:
        assert pool.map(double, range(3)) == [0, 2, 4]
    queue = context.Queue()
    process = context.Process(target=queue.put, args=[double])
    process.start()
    assert queue.get()(2) == 4
    process.join()
"""


LOADS = """
import horovod, sys
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return len(horovod.__name__) + index

if __name__ == "__main__":
    loader = DataLoader(Samples(), num_workers=1, multiprocessing_context=sys.argv[1])
    assert [int(each) for each in loader] == [7, 8, 9, 10]
"""


IMPORTS = """
import horovod, re, sys
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

missing = "'horovod.spark': nbelastic stands in for Horovod.*Use horovod.torch"
for line, says in (
    ("import horovod.spark.torch as hvd", missing),
    ("from horovod.spark import run", missing),
    ("from horovod import run; run(print, np=2)", "horovod.run starts a job.*nbelastic.fit"),
    ("import horovod; horovod.runner.run(print)", "horovod.runner.run starts a job"),
):
    try:
        exec(line)
    except (ImportError, NotImplementedError) as error:
        assert re.search(says, str(error)), error
        print(getattr(error, "name", "refused"))
"""


@pytest.mark.parametrize(
    ("text", "arguments", "printed"),
    [
        *(pytest.param(MANY, (how,), "", id=how) for how in ("fork", "spawn", "forkserver", "-m")),
        *(pytest.param(LOADS, (how,), "", id=f"loader {how}") for how in ("fork", "spawn")),
        pytest.param(IMPORTS, (), "horovod.spark " * 2 + "refused refused", id="horovod"),
        pytest.param(FORKS, (), "parent", id="forks"),
    ],
)
def test_a_script_does_in_a_rank_what_it_does_in_a_process(stage, text, arguments, printed):
    given: str | ScriptCall = text
    if "-m" in arguments:
        script(stage.folder, text, "many.py")
        given = script_call(["python", "-m", "many", "spawn"], str(stage.folder))
        arguments = ()
    stage.run(given, *arguments, name="many.py")
    assert printed in " ".join(stage.output.split())


@pytest.mark.parametrize(("alias", "word"), [(None, "real"), (False, "real"), (True, "alias")])
def test_an_installed_horovod_comes_first(stage, folder, alias, word):
    (folder / "horovod").mkdir()
    (folder / "horovod" / "__init__.py").write_text("real = True\n")
    text = "import horovod, sys\nassert hasattr(horovod, 'real') == ('real' in sys.argv)\n"
    stage.run(text, word, alias=alias)
    if alias is False:
        (folder / "horovod" / "__init__.py").unlink()
        with pytest.raises(ModuleNotFoundError, match="horovod"):
            stage.run("import horovod.torch\n", alias=False)


# -- files ---------------------------------------------------------------------------------------


def moved(given: ScriptCall, packed: bytes | None, folder: Path) -> ScriptCall:
    """Return a call as a worker gets it that does not see the script's file."""
    folder.rename(folder.with_name("away"))
    return replace(given, packed=packed)


@pytest.mark.parametrize("end", ["", "raise KeyError\n", "os.kill(os.getpid(), 9)\n"])
def test_a_worker_without_the_folder_unpacks_it_and_leaves_nothing(stage, folder, tmp_path, end):
    text = "import atexit, helper, os, sys\nfrom pathlib import Path\n"
    text += "assert 'helper.py' in os.listdir()\n"
    text += "assert not (place := Path(sys.argv[1])).exists()\nplace.write_text(os.getcwd())\n"
    text += "atexit.register(os.listdir, '.')\n"
    given = stage.call(text + end, str(tmp_path / "place"), cwd=str(folder))
    given = moved(given, bundle_of(str(folder))[0], folder)
    if end:
        with pytest.raises(RankFailed):  # of the second start, if the first was killed
            stage.run(given)
    else:
        stage.run(given)
    stage.wait()
    assert "Traceback" not in stage.output
    assert not Path((tmp_path / "place").read_text()).exists()


def test_a_worker_that_sees_the_folder_uses_it_and_a_missing_one_is_an_error(stage, folder):
    script(folder, text := "import os\nopen('here', 'w').close()\n")
    stage.run(text, cwd=str(folder), packed=bundle_of(str(folder))[0])
    assert (folder / "here").exists()
    given = moved(stage.call("pass\n"), None, folder)
    with pytest.raises(FileNotFoundError, match="without --shared-fs it is sent"):
        stage.run(given)


def test_a_bundle_leaves_out_what_is_ignored_and_says_so_but_never_the_script(folder):
    (folder / ".gitignore").write_text("data/\n*.log\n*_local.py\n")
    for name in ("data", "__pycache__", "pkg", "env"):
        (folder / name).mkdir()
        (folder / name / "x.py").write_text("1\n")
    (folder / "env" / "pyvenv.cfg").touch()
    (folder / "a.log").write_text("x")
    packed, words = bundle_of(str(folder), str(script(folder, "", "train_local.py")))
    names = {".gitignore", "helper.py", "pkg/x.py", "train_local.py"}
    assert set(zipfile.ZipFile(io.BytesIO(packed)).namelist()) == names
    assert f"4 files of {folder}" in words
    assert words.endswith("; a .gitignore excludes data/, a.log")


def test_a_file_that_cannot_travel_is_named(folder, monkeypatch):
    odd = os.fsdecode(os.path.join(os.fsencode(folder), b"caf\xe9.txt"))
    Path(odd).write_text("x")
    with pytest.raises(OptionError, match=r"caf\\udce9.txt.*utf-8"):
        bundle_of(str(folder))
    os.remove(odd)

    def refuse(file, path, *rest):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(zipfile.ZipFile, "write", refuse)
    with pytest.raises(OptionError, match=r"helper.py.*Permission denied.*\.gitignore"):
        bundle_of(str(folder))


def test_a_folder_that_is_too_large_is_refused_with_its_largest_parts(folder, monkeypatch):
    monkeypatch.setattr(bundle, "MOST_BYTES", 2**20)
    (folder / "data").mkdir()
    (folder / "data" / "x.bin").write_bytes(b"x" * 2**21)
    with pytest.raises(
        OptionError, match=r"largest: data \(2.0 MiB\).*\.gitignore, or use --shared-fs"
    ):
        bundle_of(str(folder))
