"""Where the browser is, and how it comes to be there."""

from __future__ import annotations

import os
import shutil
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL_WITHIN_S = 240.0


def find_chromium() -> str | None:
    """Return the path of a Chromium that this system has."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def install_chromium() -> str:
    """Install Debian's package, once, where that is possible; return why it is not there, or ''."""
    if os.geteuid() != 0:
        return "there is no Chromium, and only root may install it"
    if shutil.which("apt-get") is None:
        return "there is no Chromium, and no apt-get to install it with"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = "apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core"
    try:
        subprocess.run(
            ["sh", "-c", f"apt-get update -q && {install}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            text=True,
            timeout=INSTALL_WITHIN_S,
        )
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip().splitlines()[-1:]
        return f"there is no Chromium, and apt-get could not install it: {' '.join(said)}"
    except subprocess.TimeoutExpired:
        return f"there is no Chromium, and apt-get did not install it in {INSTALL_WITHIN_S:g} s"
    return ""
