"""Places that checkpoints should not be kept in, and what a job says of them."""

import json
import threading
import traceback
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from nbelastic.driver.options import Options
from nbelastic.elastic import ObjectState, load_checkpoint
from nbelastic.elastic.checkpoint import files as checkpoint_files
from nbelastic.elastic.checkpoint.files import CheckpointFiles, CheckpointSpec
from nbelastic.elastic.redaction import Secrets, without_secrets
from nbelastic.errors import NbelasticError, OptionError
from nbelastic.messages import Place
from tests.elastic.members import job

SECRET = "hunter2"


def count(state):
    state.count += 1


def run(url, name, **options):
    """Resume, count one step more, and return how many there were."""
    state, notes, _ = job(url, lambda: ObjectState(count=0), count, run=name, **options)
    return state.count, notes


@pytest.mark.parametrize("resume", [True, False])
def test_a_file_that_cannot_be_read_is_passed_over_with_a_word(resume, tmp_path, monkeypatch):
    first = CheckpointFiles(str(tmp_path), "a")
    run(tmp_path, "a")
    (path,) = (entry.path for entry in first.candidates(1, others=True))
    newer = str(Path(path).with_name("01-999999-0000000999.safetensors"))
    Path(newer).write_bytes(Path(path).read_bytes())
    refused = {newer}

    def open_file(path, mode):
        if path in refused:
            raise PermissionError(13, "Permission denied", path)
        return open(path, mode)

    monkeypatch.setattr(checkpoint_files, "open", open_file, raising=False)
    found, notes = run(tmp_path, "b" if resume else "a", resume=resume)
    assert found == 2, "the one before is read"
    assert any(f"passed over {newer}: it cannot be read" in note for note in notes)
    refused |= {entry.path for entry in first.candidates(1, others=True)}
    if resume:
        with pytest.raises(NbelasticError, match=r"cannot be read: .*Permission denied"):
            run(tmp_path, "c", resume=True)


# -- what never answers ----------------------------------------------------------------------------


class Odd(MemoryFileSystem):
    """A file system that has the whole URL in paths and errors, and calls that wait or fail."""

    protocol = "odd"
    store: dict[str, Any] = {}  # noqa: RUF012 (as its base has it)
    pseudo_dirs = [""]  # noqa: RUF012
    waits: set[str] = set()  # noqa: RUF012
    fails: set[str] = set()  # noqa: RUF012
    answers = threading.Event()

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("odd://").lstrip("/")


def _odd(name):
    def call(self, path, *args, **kwargs):
        if name in Odd.waits:
            Odd.answers.wait()
        if name in Odd.fails:
            raise PermissionError(f"530 login incorrect: {path} {self.storage_options}")
        return getattr(MemoryFileSystem, name)(self, path, *args, **kwargs)

    return call


for _name in ("_open", "ls", "mv", "isdir", "isfile"):
    setattr(Odd, _name, _odd(_name))


@pytest.fixture
def odd():
    fsspec.register_implementation("odd", Odd, clobber=True)
    yield Odd
    Odd.waits.clear()
    Odd.fails.clear()
    Odd.answers.set()
    for thread in threading.enumerate():
        if thread.name == "nbelastic-checkpoint":
            thread.join()
    Odd.answers.clear()
    Odd.store.clear()


@pytest.mark.parametrize("what", ["_open", "ls"])
def test_reading_is_given_up_where_nothing_comes(odd, what):
    run("odd://here", "a")
    odd.waits.add(what)
    with pytest.raises(NbelasticError, match=r"cannot be read: nothing was read for 0.2 s"):
        run("odd://here", "b", resume=True, patience=0.2)


def test_reading_ends_before_the_rank_counts_as_hung():
    def patience(**options):
        place = Place(0, 1, 0, 1, 0, 1)
        found = Options(checkpoint="/x", **options).rank_spec("job", "run", 1, place, None)
        assert found.checkpoint is not None
        return found.checkpoint.patience

    assert patience(stall_timeout=10.0) == 5.0
    assert patience(stall_timeout=3600.0) == 60.0


# -- what is secret --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ftp://user:hunter2@host:21/x", "ftp://***@host:21/x"),
        ("ftp://hunter2@host/x", "ftp://***@host/x"),
        ("ftp://user:hun/t?e@r2@host/x", "ftp://***@host/x"),
        ("ftp://user:hun%40ter2@host/x", "ftp://***@host/x"),
        ("simplecache::ftp://user:hunter2@host/x", "simplecache::ftp://***@host/x"),
        ("http://host/x?sig=hunter2&se=1", "http://host/x?sig=***&se=***"),
        ("http://host/x?hunter2", "http://host/x?***"),
        ("http://host/x?a=1#token=hunter2", "http://host/x?a=***#token=***"),
        ("s3://bucket/run@2", "s3://bucket/run@2"),
        ("ftp://[::1]:21/x@y", "ftp://[::1]:21/x@y"),
        ("/home/user:x@y/z?a=b", "/home/user:x@y/z?a=b"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url, shown):
    assert without_secrets(url) == shown


def test_parts_of_a_secret_are_hidden_in_texts():
    url = "ftp://user:hun%40ter2@host/x"
    assert Secrets([url]).hide("login as user with hun@ter2 refused") == (
        "login as user with *** refused"
    )
    url = "ftp://user:hun/ter2@host/x"
    assert Secrets([url]).hide("no port: 'hun'; a hundred") == "no port: '***'; a hundred"


@pytest.mark.parametrize("secret", ["hun'ter\"2", "hun\\\\ter2", "hün ter2", "hunter+2%"])
def test_a_secret_is_hidden_however_a_text_quotes_it(secret):
    secrets = Secrets([f"ftp://user:{secret}@host/x"])
    for text in (secret, repr(secret), json.dumps(secret), quote(secret), quote_plus(secret)):
        assert "ter" not in secrets.hide(f"no entry for user%3A{text}%40host")


def test_secrets_of_options_are_hidden():
    secrets = Secrets([], {"client_kwargs": {"aws_secret_key": "hunter2"}, "endpoint": "here"})
    assert secrets.hide("hunter2 refused here") == "*** refused here"
    assert secrets.shown(OSError("refused here")) is not None
    error = OSError("refused")
    error.__cause__ = OSError("hunter2")
    assert secrets.shown(error) is None


URL = f"odd://user:{SECRET}@host/x"


def test_no_note_has_the_secret_in_it(odd):
    texts = [*run(URL, "a")[1], *run(URL, "b", resume=True)[1]]
    (path,) = [path for path in Odd.store if "-a/" in path and path.endswith(".safetensors")]
    Odd.store[path].seek(0)
    Odd.store[path].truncate(20)
    for name in [path for path in Odd.store if "-b/" in path]:
        del Odd.store[name]
    texts += run(URL, "c", resume=True)[1]
    odd.fails.add("mv")
    texts += run(URL, "d")[1]
    for words in ("passed over", "goes on from", "cannot be written"):
        assert any(words in text for text in texts)
    assert SECRET not in " ".join(texts)


def test_no_error_has_the_secret_in_it(odd):
    run(URL, "a")
    odd.fails |= {"ls", "isdir"}
    shown = []
    for read in (lambda: run(URL, "b", resume=True), lambda: load_checkpoint(URL)):
        with pytest.raises(NbelasticError, match="530 login incorrect") as caught:
            read()
        shown += traceback.format_exception(caught.value)
    with pytest.raises(OptionError) as refused:
        Options(checkpoint=f"nosuch://user:{SECRET}@host/x")
    shown += traceback.format_exception(refused.value)
    assert SECRET not in " ".join(shown)


def test_what_is_logged_of_tasks_and_options_has_no_secret_in_it():
    assert SECRET not in repr(CheckpointSpec(url=URL, run="a", every=1))
    assert SECRET not in repr(Options(checkpoint=f"memory://user:{SECRET}@host/x"))
