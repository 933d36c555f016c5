"""What is made safe for Dask's connections: they carry all of it, and mean the same."""

from __future__ import annotations

import enum

import numpy as np
import pytest
import torch
from distributed.protocol import dumps, loads
from hypothesis import given
from hypothesis import strategies as st

from nbelastic.cluster.sendable import sendable


class Cunning(str):
    """A text that runs code when it is looked at."""

    __slots__ = ()

    def __str__(self):
        raise SystemExit

    __repr__ = encode = __len__ = __str__


class Evil:
    """Something that can neither be shown nor pickled."""

    def __repr__(self):
        raise SystemExit

    __str__ = __reduce__ = __repr__

    @property
    def __class__(self):
        raise SystemExit


class Colour(enum.IntEnum):
    RED = 1


CASES = {
    "surrogates": ("a\udc80b", "a\\udc80b"),
    "umlaut": ("ü", "ü"),
    "large": (2**70, 2**64 - 1),
    "small": (-(2**70), -(2**63)),
    "enum": (Colour.RED, 1),
    "numpy int": (np.int32(7), 7),
    "numpy float": (np.float32(0.5), 0.5),
    "numpy text": (np.str_("x"), "x"),
    "bytearray": (bytearray(b"x"), b"x"),
    "cunning": (Cunning("x\ud800"), "x\\ud800"),
    "keys": ({"\udc80": 1, 2**70: 2, (1, 2): 3}, {"\\udc80": 1, 2**64 - 1: 2, "[1, 2]": 3}),
    "bool": (True, True),
}


@pytest.mark.parametrize("name", CASES)
def test_odd_values_arrive_as_what_is_nearest(name):
    value, arrives = CASES[name]
    assert loads(dumps({"value": sendable(value)}))["value"] == arrives
    assert loads(dumps(sendable([{"value": (value,)}])))[0]["value"] == (arrives,)


@pytest.mark.parametrize("make", [Evil, object, torch.Tensor, set, complex])
def test_what_is_no_plain_value_arrives_as_its_name(make):
    arrived = loads(dumps({"value": sendable(make())}))["value"]
    assert make.__name__ in arrived


def test_what_contains_itself_has_an_end():
    endless: list[object] = []
    endless.append(endless)
    assert loads(dumps(sendable({"value": endless})))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters()) | st.integers(), inner)
    ),
)


@given(anything)
def test_everything_can_be_sent_and_what_could_be_is_unchanged(value):
    safe = sendable({"value": value})
    assert repr(sendable(safe)) == repr(safe)
    arrived = repr(loads(dumps(safe)))
    try:
        plain = repr(loads(dumps({"value": value})))
    except (OverflowError, UnicodeEncodeError):
        return
    assert arrived == plain
