"""Removal of passwords and tokens from URLs, and from texts that quote URLs."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus, unquote

HIDDEN = "***"

LONG = 6  # characters of a secret from which it is also hidden inside of a longer word

_PART = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://)(.*)$", re.DOTALL)
_SECRET = re.compile("key|secret|token|pass|pwd|sas|sig|cred|auth|user|account|conn", re.IGNORECASE)


def without_secrets(url: str) -> str:
    """Return a URL without user, password and values of its query. A path stays as it is."""
    return Secrets([url]).hide(url)


class Secrets:
    """Secrets of URLs and of options for file systems, whose errors quote both.

    Texts of options under names such as ``token`` are secrets.
    """

    def __init__(self, urls: Iterable[str], options: Mapping[str, Any] | None = None) -> None:
        words = {word for url in urls for word in _secrets(url)}
        words |= set(_texts(options or {}, secret=False))
        self._forms = {form for word in words for form in _forms(word)} - {""}

    def hide(self, text: str) -> str:
        """Return a text without the secrets, also where they are quoted as in code or JSON."""
        for secret in sorted(self._forms, key=len, reverse=True):
            text = _pattern(secret).sub(HIDDEN, text)
        return text

    def shown(self, error: BaseException) -> BaseException | None:
        """Return an error, to be another error's cause; None if it would show a secret."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return error if self.hide(text) == text else None


def _pattern(secret: str) -> re.Pattern[str]:
    whole = re.escape(secret)
    if len(secret) < LONG:  # it may be part of other words
        whole = rf"(?<![^\W_]){whole}(?![^\W_])"
    return re.compile(whole)


def _texts(value: Any, *, secret: bool) -> Iterator[str]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _texts(each, secret=secret or _SECRET.search(str(name)) is not None)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each, secret=secret)
    elif isinstance(value, str) and secret:
        yield value


def _forms(word: str) -> set[str]:
    """Return a secret as different texts quote it."""
    plain = {word, unquote(word)}
    return {
        form
        for each in plain
        for form in (
            each,
            quote(each, safe="", errors="replace"),
            quote_plus(each, errors="replace"),
            repr(each)[1:-1],
            json.dumps(each)[1:-1],
        )
    }


def _secrets(url: str) -> set[str]:
    found: set[str] = set()
    for part in url.split("::"):
        match = _PART.match(part)
        if match is None:
            continue
        user = _user_of(match[2])
        address, _, fragment = match[2].removeprefix(user).partition("#")
        values = [value if equals else name for name, equals, value in _pairs(address)]
        values += [value for _, _, value in _pairs("?" + fragment)]
        name, colon, password = user.partition(":")
        words = [user, password if colon else name, *values]
        if colon:  # a password that is not quoted is cut at what separates the parts of a URL
            words += re.split(r"[/@:#?]", password)
        found.update(words)
    return found - {""}


def _pairs(address: str) -> list[tuple[str, str, str]]:
    query = address.partition("?")[2]
    return [pair.partition("=") for pair in re.split("[&;?]", query)]


def _user_of(rest: str) -> str:
    """Return user and password, perhaps with characters that should have been quoted."""
    host = rest.partition("/")[0]
    if "@" in host:
        return host.rpartition("@")[0]
    _, colon, port = host.partition(":")
    if colon and not port.isdecimal() and "@" in rest and not host.startswith("["):
        return rest.rpartition("@")[0]
    return ""
