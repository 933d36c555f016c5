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

ROOT = Path(__file__).parents[2]

SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
}
"""Settings of JupyterLab: no pop-ups, and every cell in the page whether in view or not."""

STARTUP = f"""
import sys

sys.path.insert(0, {str(ROOT)!r})
import tests.support.forking

sys.path.pop(0)
"""
"""What kernels run first: clusters of notebooks start here beside other tests, many at once."""


class LabServer:
    """JupyterLab as a subprocess, whose home is an empty directory; it shows `home/notebooks`."""

    def __init__(self, home: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.notebooks, self.token = home / "notebooks", secrets.token_hex(16)
        files = {
            ".jupyter/labconfig/default_setting_overrides.json": json.dumps(SETTINGS),
            ".ipython/profile_default/startup/00-forking.py": STARTUP,
            "notebooks/.keep": "",
        }
        for name, text in files.items():
            (home / name).parent.mkdir(parents=True)
            (home / name).write_text(text)
        options = {
            "LabApp.extension_manager": "readonly",
            "ServerApp.open_browser": False,
            "ServerApp.allow_root": True,
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": self.url.rpartition(":")[2],
            "ServerApp.port_retries": 0,
            "ServerApp.root_dir": self.notebooks,
            "IdentityProvider.token": self.token,
            "KernelManager.shutdown_wait_time": 5,
        }
        ours = ("JUPYTER", "IPYTHON", "XDG_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self._log = home / "server.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *(f"--{k}={v}" for k, v in options.items())],
                env=environment | {"HOME": str(home)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def answers(self) -> bool:
        assert self._process.poll() is None, f"JupyterLab did not start:\n{self._log.read_text()}"
        try:
            self.request("GET", "/api/status")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def request(self, method: str, path: str) -> Any:
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(self.url + path, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read() or "null")

    def end_kernels(self) -> None:
        for session in self.request("GET", "/api/sessions"):
            self.request("DELETE", f"/api/sessions/{session['id']}")

    def stop(self) -> None:
        """End the server and its kernels, which need not be killed."""
        server = psutil.Process(self._process.pid)
        processes = [*server.children(recursive=True), server]
        self._process.terminate()
        _, left = psutil.wait_procs(processes, timeout=20)
        for process in left:
            process.kill()
        self._process.wait()
        assert not left, f"these outlived JupyterLab: {left}"
