"""Clusters that this process starts, closed to other users of the machine.

Any user can connect to a port of the loopback, and run code there. So all that connect must show
the cluster's own certificate: it is in memory, and in a file for this user's other processes.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.config
from distributed.security import Security

from nbelastic.cluster.journal import create, own_directory

logger = logging.getLogger(__name__)

# Dask's HTTP servers ask for no proof.
NO_PAGES: dict[str, Any] = {
    f"distributed.{each}.http.routes": [] for each in ("scheduler", "worker")
}


def publish(address: str, security: Any) -> Callable[[], None]:
    """Let this user's processes on this host find the certificate; return how to end that."""
    path = _file_of(address)
    fields = {"certificate": security.tls_client_cert, "key": security.tls_client_key}
    try:
        own_directory(path.parent)
        path.unlink(missing_ok=True)  # of a cluster that was killed and had the same port
        with create(path) as file:
            json.dump(fields, file)
    except OSError as error:
        logger.warning("other processes of yours cannot connect to %s: %s", address, error)

    def withdraw() -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    return withdraw


def security_of(address: str) -> Any:
    """Return the TLS security of a cluster started by this user; None for another cluster."""
    if not address.startswith("tls://"):
        return None
    path = _file_of(address)
    try:
        own_directory(path.parent)
        fields = json.loads(path.read_text(encoding="utf-8"))
        certificate, key = fields["certificate"], fields["key"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    terms = {"tls_ca_file": certificate, "tls_client_cert": certificate, "tls_client_key": key}
    return Security(require_encryption=True, **terms)


def configuration(security: Any) -> dict[str, Any]:
    """Return Dask's configuration for a process on another host that joins the cluster."""
    files = {"ca-file": security.tls_ca_file}
    for role in ("client", "scheduler", "worker"):
        files[f"{role}.cert"] = security.tls_worker_cert
        files[f"{role}.key"] = security.tls_worker_key
    terms = {f"distributed.comm.tls.{name}": text for name, text in files.items()}
    found: dict[str, Any] = copy.deepcopy(dask.config.global_config)
    dask.config.set({**NO_PAGES, **terms, "distributed.comm.require-encryption": True}, found)
    return found


def _file_of(address: str) -> Path:
    name = address.partition("://")[2].replace("/", "_")
    return Path(os.path.expanduser("~")) / ".cache" / "nbelastic" / "clusters" / f"{name}.json"
