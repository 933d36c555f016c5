"""Standard streams of a rank: all that code expects of a console's, but for what it would read."""

from __future__ import annotations

import codecs
import faulthandler
import io
import logging
import subprocess
import sys
import threading

import pytest
from nbelastic.cluster.worker.output import captured


@pytest.fixture
def printed():
    """What a rank's sink has got."""
    pieces: list[str] = []

    class Printed:
        def __call__(self, text):
            pieces.append(text)

        @property
        def text(self):
            return "".join(pieces)

    return Printed()


def write_bytes():
    sys.stdout.buffer.write(b"bytes \xc3")
    sys.stdout.buffer.write(b"\xbc\n")
    sys.stdout.buffer.flush()


def wrap_buffer():
    wrapper = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", line_buffering=True)
    wrapper.write("bytes ü\n")
    del wrapper  # closes what it has wrapped
    assert not sys.stdout.buffer.closed


def write_through_codec():
    codecs.getwriter("utf-8")(sys.stdout.buffer).write("bytes ü\n")


def write_raw():
    sys.stdout.buffer.raw.write(memoryview("bytes ü\n".encode()))


def reconfigure():
    sys.stdout.reconfigure(line_buffering=True, encoding="utf-8", errors="replace")
    sys.stderr.reconfigure(write_through=True)
    print("bytes ü")


def look_around():
    assert sys.stdout.errors == "replace"
    assert sys.stdout.encoding == "utf-8"
    assert (sys.stdout.name, sys.stderr.name, sys.stdin.name) == ("<stdout>", "<stderr>", "<stdin>")
    assert sys.stdout.writable() and sys.stdout.line_buffering
    sys.stdout.writelines(["bytes ", "ü\n"])


def log():
    logger = logging.getLogger("of a test")
    handler = logging.StreamHandler(sys.stdout)
    logger.addHandler(handler)
    logger.warning("bytes ü")
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    "write",
    [
        write_bytes,
        wrap_buffer,
        write_through_codec,
        write_raw,
        reconfigure,
        look_around,
        log,
    ],
)
def test_what_code_does_with_standard_output(printed, write):
    before = sys.stdout, sys.stderr, sys.stdin
    with captured(printed):
        write()
    assert printed.text == "bytes ü\n"
    assert (sys.stdout, sys.stderr, sys.stdin) == before


def test_bytes_that_are_no_text_are_replaced(printed):
    with captured(printed):
        sys.stdout.buffer.write(b"a\xff\n")
    assert printed.text == "a\N{REPLACEMENT CHARACTER}\n"


def test_text_streams_take_no_bytes_and_unknown_options(printed):
    with captured(printed):
        with pytest.raises(TypeError, match="must be str, not bytes"):
            sys.stdout.write(b"bytes")
        with pytest.raises(TypeError, match="'colour'"):
            sys.stdout.reconfigure(colour=True)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_child_processes_write_to_the_rank(printed, name):
    with captured(printed):
        for word in ("first", "second"):
            stream = getattr(sys, name)
            number = {"stdout": 1, "stderr": 2}[name]
            subprocess.run(["sh", "-c", f"echo {word} >&{number}"], check=True, **{name: stream})
    assert printed.text == "first\nsecond\n"


@pytest.mark.parametrize("command", [["cat"], ["sh", "-c", "(cat <&3 &) 3<&0; wait"]])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_child_that_goes_on_neither_holds_up_the_end_nor_prints(
    printed, monkeypatch, command, stream
):
    from nbelastic.cluster.worker import output as capture

    monkeypatch.setattr(capture, "_PATIENCE", 0.01)
    with captured(printed):
        target = getattr(sys, stream)
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=target, stderr=target)
    (reader,) = [t for t in threading.enumerate() if t.name == "nbelastic-output"]
    child.communicate(b"late\n" * 50_000)  # more than a pipe holds: it is read, or it would wait
    reader.join(30)
    assert not reader.is_alive()
    assert printed.text == ""


def test_the_descriptor_outlives_the_rank(printed, capfd):
    """``faulthandler`` keeps it."""
    with captured(printed):
        enabled = faulthandler.is_enabled()
        faulthandler.enable()
        kept = sys.stderr.fileno()
        if not enabled:
            faulthandler.disable()
        assert kept == sys.stderr.original.fileno()
        assert sys.stdout.buffer.fileno() == sys.stdout.original.fileno()


def test_streams_that_a_rank_deletes_are_there_for_the_next(printed, monkeypatch):
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # put back after the test
    with captured(printed):
        del sys.stderr
    assert not hasattr(sys, "stderr")  # the settings of the process are put back elsewhere
    sys.stderr = original = io.StringIO()
    with captured(printed):
        sys.stderr.write("next")
    assert printed.text == "next"
    assert sys.stderr is original


def test_nothing_can_be_read_and_the_error_says_what_to_do(printed):
    with captured(printed):
        with pytest.raises(EOFError, match="without fit"):
            input("name? ")
        for read in (sys.stdin.read, sys.stdin.readline, lambda: list(sys.stdin)):
            with pytest.raises(EOFError, match="without fit"):
                read()
        assert not sys.stdin.isatty()
    assert printed.text == "name? "


def test_other_threads_read_what_they_always_did(printed, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from the console\n"))
    came = []
    started, over = threading.Event(), threading.Event()

    def rank():
        with captured(printed):
            started.set()
            over.wait(30)

    thread = threading.Thread(target=rank)
    thread.start()
    started.wait(30)
    came.append(sys.stdin.readline())
    over.set()
    thread.join()
    assert came == ["from the console\n"]
