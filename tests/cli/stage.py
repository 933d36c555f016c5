"""Whole commands in this process, and discovery scripts that follow their progress."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import stat
import struct
import termios
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nbelastic.cli import commands
from nbelastic.driver import display

SCRIPT = Path(__file__).parent / "scripts" / "train.py"


class Terminal:
    """A pseudo-terminal of a width; `text` is what was written to it so far."""

    def __init__(self, width: int) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        self.stream = open(slave, "w", encoding="utf-8")  # noqa: SIM115
        self._read: list[bytes] = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        with contextlib.suppress(OSError):  # an end is closed
            while data := os.read(self.master, 65536):
                self._read.append(data)

    @property
    def text(self) -> str:
        return b"".join(self._read).decode().replace("\r\n", "\n")

    def close(self) -> str:
        """Wait until all that use it have closed it; return what was written."""
        self.stream.close()
        self._thread.join()
        os.close(self.master)
        return self.text


@dataclass
class Ended:
    """A command that has ended: its exit code, and the JSON lines that it has written."""

    code: int
    lines: list[dict[str, Any]]
    errors: str

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.lines if each["type"] == "event" and each["kind"] == kind]

    @property
    def sizes(self) -> list[int]:
        return [each["size"] for each in self.events("formed")]

    @property
    def messages(self) -> str:
        return "\n".join(each["text"] for each in self.lines if each["type"] == "message")


class Stage:
    """Runs commands with a script, its log and a discovery script in a folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.log.touch()
        self._capsys = capsys

    def run(self, *options: str, sizes: str = "1", more: tuple[str, ...] = ()) -> Ended:
        """Run ``run`` with the script to its end."""
        words = [str(SCRIPT), "--log", str(self.log), "--sizes", sizes, *more]
        before = display._display
        self._capsys.readouterr()
        try:
            line = ["--json", *options, "python", *words]
            code = commands.run.main(line, standalone_mode=False)
        finally:
            display.set_display(before)
        out, errors = self._capsys.readouterr()
        print(out, errors)  # pytest shows it with a failure
        return Ended(code, [json.loads(line) for line in out.splitlines()], errors)

    def hosts(self, *by_epoch: str) -> tuple[str, ...]:
        """Return options for hosts that change when an epoch has ended."""
        script = self.folder / "hosts.sh"
        lines = ["#!/bin/sh", f'case "$(wc -l < {self.log})" in']
        for epoch, hosts in enumerate(by_epoch):
            pattern = "*" if epoch == len(by_epoch) - 1 else str(epoch)
            lines.append(f"{pattern}) for host in {hosts}; do echo $host; done;;")
        script.write_text("\n".join([*lines, "esac", ""]))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return ("--host-discovery-script", str(script), "--discovery-interval", "0.2")

    def epochs(self) -> list[int]:
        return [json.loads(line)["size"] for line in self.log.read_text().splitlines()]


@pytest.fixture
def stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Stage:
    return Stage(tmp_path, capsys)
