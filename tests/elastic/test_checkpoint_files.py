"""Checkpoints as files: complete or passed over, whatever happens while one is written."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nbelastic.elastic.checkpoint.files import AmbiguousCheckpoints, CheckpointFiles
from nbelastic.elastic.checkpoint.format import Header, StoredTensor
from nbelastic.errors import NbelasticError


def nothing():
    pass


def put(files, version, *, loop=1, generation=1, payload=b"", moving=nothing):
    payload = payload or str(version).encode() * 50
    header = Header(job="job", loop=loop, generation=generation, version=version, size=2)
    tensors = {"x": StoredTensor("U8", [len(payload)], memoryview(payload))}
    return files.write(header, tensors, moving)


def newest(files, loop=1, *, others=True):
    """Return generation and version of what would be loaded."""
    for entry in files.candidates(loop, others=others):
        found = files.read(entry.path)
        if found is not None:
            return found.header.generation, found.header.version
    return None


def names(directory):
    return sorted(path.name for path in Path(directory).rglob("*") if path.is_file())


def test_what_is_written_is_read_back(tmp_path):
    files = CheckpointFiles(str(tmp_path), "a")
    path = put(files, 7, payload=bytes(range(256)) * 40)
    found = files.read(path)
    header, tensor = found.header, found.tensors["x"]
    assert (header.job, header.loop, header.generation, header.version) == ("job", 1, 1, 7)
    assert (header.size, tensor.dtype, tensor.shape) == (2, "U8", [256 * 40])
    assert tensor.data == bytes(range(256)) * 40


def test_other_file_systems_do_as_well():
    for run in ("a", "b"):
        files = CheckpointFiles("memory://test-checkpoints/here", run)
        for version in (1, 2, 3):
            put(files, version)
        assert newest(files) == (1, 3)
        assert [entry.version for entry in files.candidates(1, others=False)] == [3, 2]


def test_a_file_cut_at_any_byte_is_passed_over_for_the_one_before(tmp_path):
    files = CheckpointFiles(str(tmp_path), "a")
    put(files, 1)
    path = Path(put(files, 2))
    whole = path.read_bytes()
    assert newest(files) == (1, 2)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert files.read(str(path)) is None, f"cut after {length} of {len(whole)} bytes"
    path.write_bytes(whole + b"\0")
    assert files.read(str(path)) is None
    assert newest(files) == (1, 1)


def test_a_file_with_any_byte_wrong_is_passed_over_for_the_one_before(tmp_path):
    files = CheckpointFiles(str(tmp_path), "a")
    put(files, 1)
    path = Path(put(files, 2))
    whole = path.read_bytes()
    for position in range(len(whole)):
        for wrong in (whole[position] ^ 1, whole[position] ^ 0x80):
            path.write_bytes(whole[:position] + bytes([wrong]) + whole[position + 1 :])
            assert files.read(str(path)) is None, f"byte {position} of {len(whole)}"
    assert newest(files) == (1, 1)


@pytest.mark.parametrize("header", [b"{}", b'{"x":1}', b"[" * 100_000, b"\xff\xfe", b"null", None])
def test_a_huge_file_with_a_wrong_header_takes_no_memory(tmp_path, header):
    files = CheckpointFiles(str(tmp_path), "a")
    put(files, 1)
    path = Path(put(files, 2))
    head = path.read_bytes()[:-120] if header is None else struct.pack("<Q", len(header)) + header
    path.write_bytes(head)
    os.truncate(path, 1 << 40)  # to read that is a MemoryError, or the end of the process
    assert files.read(str(path)) is None
    assert newest(files) == (1, 1)


def test_a_file_of_a_later_format_is_an_error_not_a_torn_one(tmp_path, monkeypatch):
    files = CheckpointFiles(str(tmp_path), "a")
    path = put(files, 1)
    monkeypatch.setattr("nbelastic.elastic.checkpoint.format.FORMAT", 0)
    with pytest.raises(NbelasticError, match=r"\.safetensors: it has format 5"):
        files.read(path)


def test_the_two_newest_of_each_loop_are_kept(tmp_path):
    files = CheckpointFiles(str(tmp_path), "a")
    for loop in (1, 2):
        for version in (10, 20, 30, 40):
            put(files, version, loop=loop)
    assert [name[:2] + name[16:20] for name in names(tmp_path)] == [
        "010030",
        "010040",
        "020030",
        "020040",
    ]
    assert newest(files, 1) == newest(files, 2) == (1, 40)


def test_a_cancelled_checkpoint_leaves_the_one_before_intact(tmp_path):
    files = CheckpointFiles(str(tmp_path), "a")
    put(files, 1)
    calls = []

    def moving():
        calls.append(names(tmp_path))
        if len(calls) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        put(files, 2, payload=bytes(10 << 20), moving=moving)
    assert "01-000001-0000000002.safetensors.tmp" in calls[-1]
    assert names(tmp_path) == ["01-000001-0000000001.safetensors"]
    assert newest(files) == (1, 1)


def test_a_disk_that_is_full_leaves_the_one_before_intact(tmp_path):
    files = CheckpointFiles(str(tmp_path), "a")
    put(files, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            put(files, 2, payload=bytes(10 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["01-000001-0000000001.safetensors"]
    put(files, 3)
    assert newest(files) == (1, 3)


def test_a_rank_that_was_parted_with_never_makes_its_own_look_newest(tmp_path):
    former, present = (CheckpointFiles(str(tmp_path), "a") for _ in range(2))
    put(former, 100, generation=1)
    put(present, 90, generation=2)
    put(present, 95, generation=2)
    put(former, 120, generation=1)
    assert newest(present) == (2, 95)
    put(former, 140, generation=1)
    assert newest(present) == (2, 95)
    assert len(names(tmp_path)) == 2


def test_only_a_later_writer_removes_unfinished_files(tmp_path):
    files = CheckpointFiles(str(tmp_path), "a")
    run = Path(put(files, 10, generation=2)).parent
    (run / "01-000002-0000000020.safetensors.tmp").touch()
    put(files, 15, generation=1)
    assert "01-000002-0000000020.safetensors.tmp" in names(tmp_path)
    put(files, 30, generation=2)
    assert "01-000002-0000000020.safetensors.tmp" not in names(tmp_path)


def test_a_job_prefers_its_own_then_its_parents_then_the_newest(tmp_path):
    first, second, third, fourth = (CheckpointFiles(str(tmp_path), run) for run in "dcba")
    path = put(first, 1)
    put(second, 2)
    assert newest(third, others=False) is None
    assert newest(third, others=True) == (1, 2)
    third.record_parent(path)
    assert newest(third, others=False) == (1, 1)
    assert newest(fourth, others=True) == (1, 2)
    put(third, 3)
    assert newest(third, others=False) == (1, 3)
    assert newest(second, others=False) == (1, 2)
    assert newest(fourth, others=True) == (1, 3)
    runs = sorted(path.name for path in tmp_path.iterdir())
    assert runs == ["run-0001-d", "run-0002-c", "run-0003-b"]


def resumed_from(files):
    """Return what a job that resumes would load: run and commit."""
    for entry in files.candidates(1, others=True, resumes=True):
        if files.read(entry.path) is not None:
            return Path(entry.path).parent.name, entry.version
    return None


def test_a_later_run_that_had_started_anew_is_not_resumed_in_silence(tmp_path):
    first, second, third = (CheckpointFiles(str(tmp_path), run) for run in "abc")
    put(first, 300)
    put(second, 10)
    said = r"run-0002-b \(commit 10\), run-0001-a \(commit 300\)"
    with pytest.raises(AmbiguousCheckpoints, match=said):
        resumed_from(third)


def test_the_last_run_of_one_training_is_resumed(tmp_path):
    first, second, third, fourth = (CheckpointFiles(str(tmp_path), run) for run in "dcba")
    path = put(first, 300)
    second.record_parent(path)  # it was lost before its first checkpoint
    assert resumed_from(third) == ("run-0001-d", 300)
    third.record_parent(path)
    path = put(third, 10)  # its commits count from its own start
    assert resumed_from(fourth) == ("run-0003-b", 10)
    Path(path).write_bytes(b"torn")
    assert resumed_from(fourth) == ("run-0001-d", 300)


def test_two_runs_that_go_on_from_one_are_two_trainings(tmp_path):
    first, second, third, fourth = (CheckpointFiles(str(tmp_path), run) for run in "abcd")
    path = put(first, 5)
    for files in (second, third):
        files.record_parent(path)
        put(files, 6)
    with pytest.raises(AmbiguousCheckpoints, match="holds 2 trainings"):
        resumed_from(fourth)


def test_a_run_without_a_checkpoint_is_no_training(tmp_path):
    put(CheckpointFiles(str(tmp_path), "a"), 5)
    (tmp_path / "run-0002-b").mkdir()
    (tmp_path / "run-0003-c").mkdir()
    (tmp_path / "run-0003-c" / "01-000001-0000000009.safetensors.tmp").write_bytes(b"")
    assert resumed_from(CheckpointFiles(str(tmp_path), "d")) == ("run-0001-a", 5)


def test_a_directory_that_cannot_be_listed_is_passed_over(tmp_path, monkeypatch):
    put(CheckpointFiles(str(tmp_path), "a"), 5)
    files = CheckpointFiles(str(tmp_path), "c")
    closed = str(tmp_path / "run-0002-b")
    Path(closed).mkdir()
    listed = type(files._storage[0]).ls

    def ls(self, path, **options):
        if path == closed:
            raise PermissionError(13, "Permission denied", path)
        return listed(self, path, **options)

    monkeypatch.setattr(type(files._storage[0]), "ls", ls)
    assert resumed_from(files) == ("run-0001-a", 5)
    assert list(files.unlisted) == [closed]


def test_runs_that_begin_at_once_have_numbers_of_their_own(tmp_path):
    with ThreadPoolExecutor(12) as threads:
        made = [CheckpointFiles(str(tmp_path), f"r{number}") for number in range(12)]
        list(threads.map(lambda files: put(files, 1), made))
    numbers = sorted(path.name.split("-")[1] for path in tmp_path.iterdir())
    assert numbers == [f"{number:04d}" for number in range(1, 13)]


def test_nothing_is_found_where_nothing_is(tmp_path):
    assert newest(CheckpointFiles(str(tmp_path / "not" / "there"), "a")) is None


KILLED = """
import os, random, signal, sys, time
from nbelastic.elastic.checkpoint.files import CheckpointFiles
from nbelastic.elastic.checkpoint.format import Header, StoredTensor

url = sys.argv[1]
chance = random.Random(3)
PIECES, LENGTH = 12, 100_000

def content(version):
    return random.Random(version).randbytes(PIECES * LENGTH)

def pieces(payload):
    for at in range(0, len(payload), LENGTH):
        yield memoryview(payload)[at : at + LENGTH]

def burn(fuse):
    if fuse[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    fuse[0] -= 1

def write_on(version, acknowledge, fuse):
    files = CheckpointFiles(url, "a")
    while True:
        version += 1
        payload = content(version)
        header = Header(job="job", loop=1, generation=1, version=version, size=1)
        tensors = {str(n): StoredTensor("U8", [len(piece)], piece)
                   for n, piece in enumerate(pieces(payload))}
        files.write(header, tensors, lambda: burn(fuse))
        os.write(acknowledge, version.to_bytes(8, "little"))

def killed(version, by_itself):
    told, acknowledge = os.pipe()
    fuse = chance.randrange(3 * PIECES) if by_itself else -1
    writer = os.fork()
    if not writer:
        os.close(told)
        write_on(version, acknowledge, [fuse])
    os.close(acknowledge)
    if not by_itself:
        time.sleep(chance.uniform(0, 0.1))
        os.kill(writer, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(writer, 0)[1]) == signal.SIGKILL
    last = os.read(told, 1 << 16)[-8:]
    os.close(told)
    return max(version, int.from_bytes(last, "little"))

version = torn = 0
for number in range(30):
    acknowledged = killed(version, by_itself=number % 2 == 0)
    files = CheckpointFiles(url, "a")
    found = [files.read(entry.path) for entry in files.candidates(1, others=False)]
    torn += any(name.endswith(".tmp") for _, _, names in os.walk(url) for name in names)
    if not acknowledged and not found:
        continue
    newest = next(each for each in found if each is not None)
    header, tensors = newest.header, newest.tensors
    assert header.version in (acknowledged, acknowledged + 1), (header, acknowledged)
    assert b"".join(tensors[str(n)].data for n in range(PIECES)) == content(header.version)
    version = header.version
print(version, torn)
"""


@pytest.mark.slow
def test_killed_at_any_moment_the_newest_complete_one_is_intact(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert result.returncode == 0, result.stderr
    written, torn = map(int, result.stdout.split())
    assert written >= 5, "hardly anything was written"
    assert torn >= 15, "hardly any kill came in the middle of a file"
