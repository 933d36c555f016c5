"""Control groups with a limit of memory, where they can be made."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def _own_groups() -> dict[str, str]:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return dict(line.split(":", 2)[1:] for line in lines)


def limit_memory(name: str, size: int) -> str:
    """Move the calling process into a new group that may use `size` bytes; return why not.

    Children that run already stay where they are. What the process uses by now stays charged to the
    group that it comes from.
    """
    own = _own_groups()
    try:
        if "memory" in own:
            group = _ROOT / f"memory{own['memory']}" / name
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(size))
        else:
            parent = Path(f"{_ROOT}{own['']}")
            if "memory" not in (parent / "cgroup.subtree_control").read_text().split():
                return "no memory controller is handed down here"
            group = parent / name
            group.mkdir()
            (group / "memory.max").write_text(str(size))
            (group / "memory.swap.max").write_text("0")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        return f"no control group can be made: {error}"
    return ""


def remove_group(name: str) -> None:
    """Move the processes of a group back to where it is, and remove it."""
    own = _own_groups()
    parent = _ROOT / f"memory{own['memory']}" if "memory" in own else Path(f"{_ROOT}{own['']}")
    group = parent / name
    if not group.exists():
        return
    for pid in (group / "cgroup.procs").read_text().split():
        try:
            (parent / "cgroup.procs").write_text(pid)
        except OSError:
            pass  # it has ended
    group.rmdir()
