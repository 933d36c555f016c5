"""Checkpoints as files: complete or passed over, whatever happens while one is written."""

import os
import re
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.implementations.local import LocalFileSystem

from nbelastic.elastic.checkpoint import files as checkpoint_files
from nbelastic.elastic.checkpoint.files import CheckpointFiles
from nbelastic.elastic.checkpoint.format import Header, StoredTensor
from nbelastic.errors import NbelasticError
from tests.elastic.members import files_in


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
            return found[0].generation, found[0].version
    return None


def test_a_file_with_any_byte_missing_or_wrong_is_passed_over_for_the_one_before(tmp_path):
    files = CheckpointFiles(str(tmp_path), "a")
    put(files, 1)
    path = Path(put(files, 2))
    whole = path.read_bytes()
    assert newest(files) == (1, 2)
    spoilt = [whole + b"\0"]
    for at, byte in enumerate(whole):
        spoilt += [whole[:at] + bytes([byte ^ bit]) + whole[at + 1 :] for bit in (1, 0x80)]
        spoilt.append(whole[:at])
    for content in spoilt:
        path.write_bytes(content)
        assert files.read(str(path)) is None, content
    assert newest(files) == (1, 1)


@pytest.mark.parametrize("header", [b"{}", b'{"x":1}', b"[" * 100_000, b"\xff\xfe", b"null", None])
def test_a_huge_file_with_a_wrong_header_takes_no_memory(tmp_path, header):
    files = CheckpointFiles(str(tmp_path), "a")
    put(files, 1)
    path = Path(put(files, 2))
    if header is not None:  # else that of a small file
        path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 1 << 40)  # to read that is a MemoryError, or the end of the process
    assert files.read(str(path)) is None
    assert newest(files) == (1, 1)


def test_a_file_of_a_later_format_is_an_error_not_a_torn_one(tmp_path, monkeypatch):
    files = CheckpointFiles(str(tmp_path), "a")
    path = put(files, 1)
    monkeypatch.setattr("nbelastic.elastic.checkpoint.format.FORMAT", 0)
    with pytest.raises(NbelasticError, match=r"\.safetensors: it has format 8"):
        files.read(path)


def test_the_two_newest_of_each_loop_are_kept(tmp_path):
    files = CheckpointFiles(str(tmp_path), "a")
    for loop in (1, 2):
        for version in (10, 20, 30, 40):
            put(files, version, loop=loop)
    assert [name[:2] + name[16:20] for name in files_in(tmp_path)] == [
        "010030",
        "010040",
        "020030",
        "020040",
    ]
    assert newest(files, 1) == newest(files, 2) == (1, 40)


def test_a_rank_that_was_parted_with_never_makes_its_own_look_newest(tmp_path):
    """Nor removes what others have not finished."""
    former, present = (CheckpointFiles(str(tmp_path), "a") for _ in range(2))
    put(former, 100, generation=1)
    run = Path(put(present, 90, generation=2)).parent
    unfinished = run / "01-000002-0000000095.safetensors.tmp"
    unfinished.touch()
    put(former, 120, generation=1)
    assert unfinished.exists() and newest(present) == (2, 90)
    put(present, 96, generation=2)
    assert not unfinished.exists()
    put(former, 140, generation=1)
    assert newest(present) == (2, 96)
    assert len(files_in(tmp_path)) == 2


def resumed_from(files):
    """Return what a job that resumes would load: run and commit."""
    for entry in files.candidates(1, others=True, resumes=True):
        if files.read(entry.path) is not None:
            return Path(entry.path).parent.name, entry.version
    return None


# Of runs, in their order, what they continue and the commit that they write; what is resumed then.
RUNS = [
    ("a300 b10", r"run-0002-b \(commit 10\), run-0001-a \(commit 300\)"),  # it started anew
    ("a5 b<a b6 c<a c6", "holds 2 trainings"),
    ("d300 c<d", ("run-0001-d", 300)),  # lost before its first checkpoint
    ("d300 c<d b<d b10", ("run-0003-b", 10)),  # its commits count from its own start
    ("d300 b<d b10 b!", ("run-0001-d", 300)),  # torn
    ("a5 b. c.", ("run-0001-a", 5)),  # without a checkpoint
]


@pytest.mark.parametrize(("runs", "expected"), RUNS)
def test_the_last_run_of_the_only_training_is_resumed(tmp_path, runs, expected):
    paths = {}
    for run, what, more in (re.fullmatch(r"(.)(\d|.)(.*)", word).groups() for word in runs.split()):
        files = CheckpointFiles(str(tmp_path), run)
        if what == "<":
            files.record_parent(paths[more])
        elif what == "!":
            Path(paths[run]).write_bytes(b"torn")
        elif what == ".":
            Path(files._directory(), "01-000001-0000000009.safetensors.tmp").touch()
        else:
            paths[run] = put(files, int(what + more))
    resuming = CheckpointFiles(str(tmp_path), "x")
    if isinstance(expected, tuple):
        assert resumed_from(resuming) == expected
    else:
        with pytest.raises(NbelasticError, match=expected):
            resumed_from(resuming)


def test_killed_at_any_moment_the_newest_complete_one_is_intact(tmp_path, monkeypatch):
    """At each moment of a write, what a kill would leave behind is looked at."""
    monkeypatch.setattr("nbelastic.elastic.checkpoint.format._CHUNK_BYTES", 1000)
    place, left, seen = tmp_path / "place", tmp_path / "left", []

    def look():
        shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(place, left)
        torn = any(name.endswith(".tmp") for name in files_in(left))
        seen.append((newest(CheckpointFiles(str(left), "a")), torn))

    def around(function):
        def call(*args, **options):
            look()
            result = function(*args, **options)
            look()
            return result

        return call

    renaming = SimpleNamespace(**{**vars(os), "replace": around(os.replace)})
    monkeypatch.setattr(checkpoint_files, "os", renaming)
    monkeypatch.setattr(LocalFileSystem, "rm_file", around(LocalFileSystem.rm_file))
    for version in range(1, 5):
        put(CheckpointFiles(str(place), "a"), version, payload=bytes(20_000), moving=look)
        allowed = ((1, version - 1) if version > 1 else None, (1, version))
        assert {found for found, _ in seen} == set(allowed)
        assert any(torn for _, torn in seen) and not seen[-1][1]
        seen.clear()
