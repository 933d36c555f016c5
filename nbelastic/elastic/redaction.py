"""Removal of passwords and tokens from URLs, and from texts that quote them."""

from __future__ import annotations

import re
from urllib.parse import unquote

__all__ = ["hide_secrets", "without_secrets"]

HIDDEN = "***"

_PART = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://)(.*)$", re.DOTALL)


def without_secrets(url: str) -> str:
    """Return a URL without user, password and values of its query. A path stays as it is."""
    return hide_secrets(url, url)


def hide_secrets(text: str, url: str) -> str:
    """Return a text without the secrets of a URL, of which file systems quote parts."""
    for secret in sorted(_secrets(url), key=len, reverse=True):
        # A short one may be part of other words.
        text = re.sub(rf"(?<![^\W_]){re.escape(secret)}(?![^\W_])", HIDDEN, text)
    return text


def _secrets(url: str) -> set[str]:
    found: set[str] = set()
    for part in url.split("::"):
        match = _PART.match(part)
        if match is None:
            continue
        user = _user_of(match[2])
        query = match[2].removeprefix(user).partition("?")[2]
        values = [pair.partition("=")[2] for pair in re.split("[&;]", query)]
        name, colon, password = user.partition(":")
        words = [user, password if colon else name, *values]
        if colon:  # a password that is not quoted is cut at what separates the parts of a URL
            words += re.split(r"[/@:#?]", password)
        for word in words:
            found |= {word, unquote(word)}
    return found - {""}


def _user_of(rest: str) -> str:
    """Return user and password, which may have characters that should have been quoted."""
    host = rest.partition("/")[0]
    if "@" in host:
        return host.rpartition("@")[0]
    _, colon, port = host.partition(":")
    if colon and not port.isdecimal() and "@" in rest and not host.startswith("["):
        return rest.rpartition("@")[0]
    return ""
