"""A notebook's shell in the test's process, and a ``fit`` that needs no cluster."""

import atexit
import threading

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import nbelastic
from nbelastic.notebook import magics
from tests.notebook.fakes import FakeFit, Stage


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """A fresh shell with the magics; nothing of it is left afterwards."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.warn_venv = False
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance(config=config)
    magics.load_ipython_extension(made)
    yield made
    atexit.unregister(made.atexit_operations)
    made.restore_sys_module_state()
    InteractiveShell.clear_instance()


@pytest.fixture
def fit(monkeypatch):
    """Stands in for ``nbelastic.fit``."""
    fake = FakeFit()
    monkeypatch.setattr(nbelastic, "fit", fake)
    monkeypatch.setattr(magics, "wait_interruptibly", fake.wait_interruptibly)
    return fake


@pytest.fixture
def no_client(monkeypatch):
    """As if the notebook had made no Dask client."""

    def none():
        raise ValueError("no clients found")

    monkeypatch.setattr("distributed.Client.current", none)


@pytest.fixture
def stage():
    stage = Stage()
    yield stage
    for group in stage.groups():
        group._job.end()
        group.join()
    left = [t.name for t in threading.enumerate() if t.name.startswith("nbelastic-panel")]
    assert left == []
