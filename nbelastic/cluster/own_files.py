"""Files readable by this user alone, also below a directory shared by all users.

There, another user may have made the directory first, or put a link in a file's place.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def own_directory(path: Path) -> Path:
    """Make a private directory of this user; raise PermissionError for another user's.

    Its parents are not looked at: they belong to this user, or are sticky as ``/tmp`` is.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is a link or a file, and must be a directory")
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user (number {found.st_uid})")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def create(path: Path) -> int:
    """Create a new file for this user alone; return its descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags, 0o600)
