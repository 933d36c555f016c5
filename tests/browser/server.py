"""A JupyterLab server of the tests' own: its notebooks, settings and kernels, and nobody else's.

Everything that Jupyter and IPython would read from or write to a user's home lies in one temporary
directory. The server is a subprocess; when it is stopped, it ends its kernels, and what has not
ended within a bound is killed and named.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from tests.support.clusters import until

ROOT = Path(__file__).parents[2]

SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/apputils-extension:themes": {"theme": "JupyterLab Light"},
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
}
"""Settings of JupyterLab: no pop-ups, and every cell in the page whether in view or not."""

OPTIONS = (
    "--no-browser",
    "--allow-root",
    "--LabApp.extension_manager=readonly",
    "--ServerApp.port_retries=0",
    "--ServerApp.open_browser=False",
    "--KernelManager.shutdown_wait_time=5",
)


STARTUP = f"""
import sys

sys.path.insert(0, {str(ROOT)!r})
import tests.support.forking

sys.path.pop(0)
"""
"""What kernels run first: clusters of notebooks start here beside other tests, many at once."""


class LabServer:
    """JupyterLab as a subprocess.

    Parameters
    ----------
    home : Path
        An empty directory; ``home / "notebooks"`` is what the server shows.
    """

    def __init__(self, home: Path) -> None:
        self.notebooks = home / "notebooks"
        self.token = secrets.token_hex(16)
        self.url = f"http://127.0.0.1:{_free_port()}"
        self._log = home / "server.log"
        self._settings = home / "lab-settings"
        self._environment = _write_settings(home)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the server, and wait until it answers."""
        self.notebooks.mkdir()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "jupyterlab",
                    *OPTIONS,
                    "--ServerApp.ip=127.0.0.1",
                    f"--ServerApp.port={self.url.rpartition(':')[2]}",
                    f"--ServerApp.root_dir={self.notebooks}",
                    f"--IdentityProvider.token={self.token}",
                ],
                env=os.environ | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until(self._answers, "JupyterLab answers", timeout=timeout_s)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"JupyterLab did not start:\n{self._log.read_text()}"
        try:
            self.request("GET", "/api/status")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Call the server's API; return what it says."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token}"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            text = response.read()
        return json.loads(text) if text else None

    def end_kernels(self) -> None:
        """End the kernels of all notebooks."""
        for session in self.request("GET", "/api/sessions"):
            self.request("DELETE", f"/api/sessions/{session['id']}")

    def forget_settings(self) -> None:
        """Undo what was changed in JupyterLab's settings."""
        for path in self._settings.rglob("*.jupyterlab-settings"):
            path.unlink()

    def stop(self, timeout_s: float = 20.0) -> list[str]:
        """End the server and its kernels; return what had to be killed."""
        if self._process is None:
            return []
        processes = _family(self._process.pid)
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _, left = psutil.wait_procs(processes, timeout=timeout_s)
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=timeout_s)
        return [str(process) for process in left]


def _family(pid: int) -> list[psutil.Process]:
    """Return a process's children, theirs, and so on."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _write_settings(home: Path) -> dict[str, str]:
    """Fill the directories of Jupyter; return the variables that point to them."""
    places = {
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_DATA_DIR": home / "data",
        "JUPYTER_PATH": home / "data",  # its kernel before the one of the same name in the venv
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": home / "lab-settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
        "IPYTHONDIR": home / "ipython",
    }
    for place in places.values():
        place.mkdir(exist_ok=True)
    labconfig = home / "config" / "labconfig"
    labconfig.mkdir()
    (labconfig / "default_setting_overrides.json").write_text(json.dumps(SETTINGS))
    startup = home / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00-forking.py").write_text(STARTUP)
    kernel = home / "data" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    return {name: str(place) for name, place in places.items()}
