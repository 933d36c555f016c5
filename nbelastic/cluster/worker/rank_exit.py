"""Describe how the process of a rank has ended."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass

from nbelastic.elastic.ranks.stack import NOT_THE_USERS

_LINE = re.compile(r'File "(.*)", line (\d+) in (\S+)')


@dataclass(frozen=True)
class ProcessExit:
    """End of a rank's process."""

    status: int | None = None  # as ``wait(2)`` returns it; None if it is not known
    reason: str = ""  # why the worker has ended it, or why its status is not known
    out_of_memory: bool = False  # the system ended a process of this cgroup while the rank ran
    stack: str = ""  # of its Python threads at a fatal signal

    def __str__(self) -> str:
        if self.reason or self.status is None:
            return self.reason or "its process has ended"
        if os.WIFEXITED(self.status):
            return f"its process exited with status {os.WEXITSTATUS(self.status)}"
        number = os.WTERMSIG(self.status)
        if self.out_of_memory and number == signal.SIGKILL:
            return "its process was killed by the system: out of memory"
        try:
            name = f" ({signal.Signals(number).name})"
        except ValueError:  # a real-time signal
            name = ""
        return f"its process was killed by signal {number}{name}{self._place()}"

    @property
    def crash(self) -> str:
        """What Python has written at a fatal signal, of the thread that has received it."""
        what, *blocks = self.stack.split("\n\n")
        current = [each for each in blocks if each.startswith("Current thread")]
        return "\n".join([what, *current, ""]) if current else ""

    def _place(self) -> str:
        """Return the line of the user's at which the thread stood that received the signal."""
        for file, line, function in _LINE.findall(self.crash):
            if not file.startswith(NOT_THE_USERS):
                return f", at {file}, line {line}, in {function}"
        return ""


def out_of_memory_kills() -> int:
    """Return how often the kernel has ended a process of this cgroup for its memory."""
    try:
        with open("/proc/self/cgroup") as file:
            places = dict(line.strip().split(":", 2)[1:] for line in file)
    except (OSError, ValueError):
        return 0
    found = 0
    names = [f"/sys/fs/cgroup{places['']}/memory.events"] if "" in places else []
    if "memory" in places:
        names.append(f"/sys/fs/cgroup/memory{places['memory']}/memory.oom_control")
    # Inside of a container, the own cgroup is often mounted as the root.
    names += ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"]
    for name in names:
        try:
            with open(name) as file:
                counts = dict(line.split() for line in file)
        except (OSError, ValueError):
            continue
        found = max(found, int(counts.get("oom_kill", 0)))
    return found
