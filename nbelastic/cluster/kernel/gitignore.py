"""Decide which files a ``.gitignore`` excludes, as git does.

Runs in the kernel, in the thread that calls ``fit``.
"""

from __future__ import annotations

import os
import re

_Rule = tuple[bool, bool, re.Pattern[str]]
"""Whether a match excludes; whether only directories match; what matches."""


class GitIgnore:
    """The ``.gitignore`` files above and below a directory; each is read once.

    Parameters
    ----------
    top : str
        The directory, an absolute path. Files above it count if they belong to the same git
        repository, and if they do not exclude the directory itself.
    """

    def __init__(self, top: str) -> None:
        self._begin(_repository(top) or top)
        if self.excludes(top, directory=True):  # a home directory under git that names its files
            self._begin(top)

    def _begin(self, base: str) -> None:
        self._base = base
        self._rules: dict[str, list[tuple[int, _Rule]]] = {}
        self._excluded: dict[str, bool] = {base: False}

    def excludes(self, path: str, *, directory: bool) -> bool:
        """Return whether git would leave out a file or directory below the top.

        Nothing below an excluded directory can be included again.
        """
        if path not in self._excluded:
            parent = os.path.dirname(path)
            self._excluded[path] = self.excludes(parent, directory=True) or self._matches(
                path, parent, directory
            )
        return self._excluded[path]

    def _matches(self, path: str, parent: str, directory: bool) -> bool:
        excluded = False
        for start, (excludes, directories_only, pattern) in self._rules_in(parent):
            if (directory or not directories_only) and pattern.fullmatch(path, start):
                excluded = excludes  # the last one that matches decides
        return excluded

    def _rules_in(self, directory: str) -> list[tuple[int, _Rule]]:
        """Return the rules for what is in a directory, each with where its path begins."""
        if directory not in self._rules:
            rules = [] if directory == self._base else self._rules_in(os.path.dirname(directory))
            start = len(directory.rstrip(os.sep)) + 1
            self._rules[directory] = [*rules, *((start, rule) for rule in _read(directory))]
        return self._rules[directory]


def _repository(directory: str) -> str | None:
    while not os.path.exists(os.path.join(directory, ".git")):
        parent = os.path.dirname(directory)
        if parent == directory:
            return None
        directory = parent
    return directory


def _read(directory: str) -> list[_Rule]:
    try:
        with open(
            os.path.join(directory, ".gitignore"), encoding="utf-8", errors="replace"
        ) as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    return [rule for rule in map(_rule, lines) if rule is not None]


def _rule(line: str) -> _Rule | None:
    """Read a line; None if it holds no pattern."""
    line = re.sub(r"(?<!\\)\s+$", "", line)
    if not line or line.startswith("#"):
        return None
    excludes = not line.startswith("!")
    line = line if excludes else line[1:]
    directories_only = line.endswith("/")
    line = line.rstrip("/")
    anywhere = "/" not in line
    try:
        pattern = re.compile(("(?:.*/)?" if anywhere else "") + _regex(line.lstrip("/")), re.DOTALL)
    except re.error:
        return None
    return excludes, directories_only, pattern


def _regex(glob: str) -> str:
    """Translate git's wildcards."""
    token = re.compile(r"\*\*/|/\*\*$|\*+|\?|\[[!^]?\]?[^]]*\]|\\.|.", re.DOTALL)
    return "".join(map(_translate, token.findall(glob)))


def _translate(token: str) -> str:
    fixed = {"**/": "(?:.*/)?", "/**": "/.*", "?": "[^/]"}
    if token in fixed:
        return fixed[token]
    if token.startswith("*"):
        return "[^/]*"
    if token.startswith("[") and len(token) > 1:
        return "[^" + token[2:] if token[1] in "!^" else token
    return re.escape(token[-1])
