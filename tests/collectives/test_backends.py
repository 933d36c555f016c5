"""Backends by name, and one that another package brings: the seam that a transport fits."""

import contextlib
import sys

import pytest

from nbelastic import collectives
from nbelastic.collectives import SoloCommunicator, backend_names, connect
from nbelastic.driver.options import Options
from nbelastic.errors import OptionError
from tests.collectives.worlds import terms


@pytest.fixture
def another_package(tmp_path, monkeypatch):
    """Install a package with an entry point."""
    info = tmp_path / "somebodys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    points = "[nbelastic.backends]\nown = tests.support.own_transport:OwnTransport\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    collectives._brought.cache_clear()
    yield
    collectives._brought.cache_clear()


def test_a_backend_of_another_package_is_an_option_while_that_is_installed(another_package):
    assert backend_names()[-1] == "own"
    assert Options(backend="own").backend == "own"
    with contextlib.closing(connect(terms(backend="own"))) as communicator:
        assert communicator.name == "own"


def test_an_unknown_backend_is_refused():
    with pytest.raises(OptionError, match="backend='own': must be one of auto, gloo, shm"):
        Options(backend="own")
    with pytest.raises(ValueError, match=r"backend must be one of .*'auto', 'gloo'.* not 'own'"):
        connect(terms(backend="own"))


def test_it_says_which_package_is_missing_and_for_which_python(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygloo", None)
    monkeypatch.delitem(sys.modules, "nbelastic.collectives.gloo.with_pygloo", raising=False)
    with pytest.raises(ImportError, match=r"pygloo.*Python 3.8 to 3.10.*pip install"):
        connect(terms(backend="pygloo"))


def test_a_rank_alone_needs_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygloo", None)
    assert isinstance(connect(terms(0, 1, backend="pygloo")), SoloCommunicator)
