"""Decide which files a ``.gitignore`` excludes, as git does."""

from __future__ import annotations

import os
from typing import Any

from pathspec import GitIgnoreSpec


class GitIgnore:
    """The ``.gitignore`` files above and below a directory; each is read once.

    Files above the directory, an absolute path, count if they belong to the same git repository,
    and if they do not exclude the directory itself.
    """

    def __init__(self, top: str) -> None:
        self._begin(_repository(top) or top)
        if self.excludes(top, directory=True):  # a home directory under git that names its files
            self._begin(top)

    def _begin(self, base: str) -> None:
        self._base = base
        self._specs: dict[str, GitIgnoreSpec] = {}
        self._excluded: dict[str, bool] = {base: False}

    def excludes(self, path: str, *, directory: bool) -> bool:
        """Return whether git would leave out a file or directory below the top."""
        if path not in self._excluded:
            parent = os.path.dirname(path)
            # Nothing below an excluded directory can be included again.
            self._excluded[path] = self.excludes(parent, directory=True) or self._matches(
                path, parent, directory
            )
        return self._excluded[path]

    def _matches(self, path: str, folder: str, directory: bool) -> bool:
        """Ask the file in the nearest folder first: it overrides those above."""
        while True:
            name = os.path.relpath(path, folder) + "/" * directory
            found = self._spec(folder).check_file(name).include
            if found is not None or folder == self._base:
                return bool(found)
            folder = os.path.dirname(folder)

    def _spec(self, folder: str) -> GitIgnoreSpec:
        if folder not in self._specs:
            self._specs[folder] = _read(os.path.join(folder, ".gitignore"))
        return self._specs[folder]


def _repository(directory: str) -> str | None:
    while not os.path.exists(os.path.join(directory, ".git")):
        parent = os.path.dirname(directory)
        if parent == directory:
            return None
        directory = parent
    return directory


def _read(path: str) -> GitIgnoreSpec:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            patterns = [each for line in file for each in _patterns(line)]
    except OSError:
        patterns = []
    return GitIgnoreSpec(patterns)


def _patterns(line: str) -> list[Any]:
    try:
        return list(GitIgnoreSpec.from_lines([line]).patterns)
    except ValueError:
        return []  # such as a lone "!", which git passes over, too
