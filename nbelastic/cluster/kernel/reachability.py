"""Check for a scheduler at an address, and close own clusters to other users.

A Dask client waits half a minute where nothing listens. It waits without end where
something else listens, such as a dashboard, because its handshake has no limit, and where a
scheduler that it is connected to has stopped.

Any user can connect to a port of the loopback, and run code there. So all that connect must show
the cluster's own certificate: it is in memory, and in a file for this user's other processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed import Client
from distributed.comm.addressing import get_address_host_port, parse_address
from distributed.comm.core import connect
from distributed.core import send_recv
from distributed.security import Security
from distributed.utils import LoopRunner

from nbelastic.errors import ClusterLost, OptionError

logger = logging.getLogger(__name__)

CONNECT_WITHIN_S = 10.0  # seconds for a scheduler to answer, or Dask's own limit if that is less
QUIET_S = 1.0  # seconds before the user sees what is waited for


def check_scheduler(address: str, security: Any, tell: Callable[[str], None]) -> None:
    """Return once a scheduler has answered; `tell` takes a line where that takes longer.

    Raises OptionError where the address is no scheduler's, ClusterLost where none answers.
    Without `security`, the certificates for ``tls://`` are those of Dask's configuration.
    """
    wrong = f"cluster={address!r}: must be a scheduler's address, as in tcp://10.0.0.5:8786"
    scheme, place = parse_address(address)
    if scheme in ("http", "https"):
        raise OptionError(f"{wrong}; this is that of a web page, such as Dask's dashboard")
    if scheme not in ("tcp", "tls") or not isinstance(security, Security | None):
        return
    try:
        _, port = get_address_host_port(f"{scheme}://{place}")
    except ValueError:
        port = 0
    if not 0 < port < 65536:
        raise OptionError(wrong)
    terms: dict[str, Any] = (security or Security()).get_connection_args("client")
    if scheme == "tls" and terms.get("ssl_context") is None:
        raise OptionError(
            f"cluster={address!r}: tls:// needs certificates; pass Client(address, "
            "security=Security(...)), or set them in Dask's configuration. A cluster that "
            "nbelastic has started is open to processes of its own user, on its own host"
        )
    configured = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"), "s")
    limit = min(float(configured), CONNECT_WITHIN_S)
    runner: Any = LoopRunner()
    try:  # connecting alone ends with its own reason, a moment earlier
        kind = runner.run_sync(
            *(_answer, _kind_of(address, terms, limit), limit + 0.1),
            lambda: tell(f"connecting to {address}; trying for {limit:g} s"),
        )
    except (asyncio.TimeoutError, TimeoutError):
        problem = f"the connection is accepted, but nothing is answered for {limit:g} s"
    except OSError as error:
        problem = f"it closed the connection (a scheduler with TLS needs tls://): {error}"
        if "Timed out trying to connect" in str(error):  # Dask's reason is its last, short try's
            problem = _why_not_connected(address)
    except Exception as error:  # whatever Dask makes of what has answered
        problem = f"what answers is no scheduler ({type(error).__name__})"
    else:
        if kind != "Scheduler":
            raise OptionError(
                f"cluster={address!r}: this is the address of a {kind.lower()}; "
                "must be that of the scheduler"
            )
        return
    raise ClusterLost(
        f"cluster={address!r}: no scheduler answers there: {problem}; "
        "check host and port, and that the scheduler runs"
    )


def check_answers(client: Client, tell: Callable[[str], None]) -> None:
    """Return once the scheduler of a connected client has answered; else raise ClusterLost."""
    limit = float(parse_timedelta(dask.config.get("distributed.comm.timeouts.tcp"), "s"))
    scheduler: Any = client.scheduler
    words = f"the scheduler at {scheduler.address} does not answer so far; trying for {limit:g} s"
    try:
        client.sync(_answer, scheduler.echo(), limit, lambda: tell(words))
    except asyncio.TimeoutError:
        raise ClusterLost(
            f"cluster: the scheduler has not answered for {limit:g} s, although it is connected; "
            f"check that it is not stopped or busy ({scheduler.address})"
        ) from None


async def _answer(asking: Coroutine[Any, Any, Any], limit: float, tell: Callable[[], None]) -> Any:
    """Return an answer of a server; `tell` the user what is waited for if it takes long."""
    timer = asyncio.get_running_loop().call_later(min(QUIET_S, limit / 2), tell)
    try:
        return await asyncio.wait_for(asking, limit)
    finally:
        timer.cancel()


async def _kind_of(address: str, terms: dict[str, Any], limit: float) -> str:
    """Return the type of a server of Dask's."""
    connecting: Any = connect(address, timeout=limit, **terms)
    comm = await connecting
    try:
        found = await send_recv(comm, op="identity")
    finally:
        comm.abort()
    return str(found["type"])


def _why_not_connected(address: str) -> str:
    try:
        socket.create_connection(get_address_host_port(address), timeout=QUIET_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return "it answers too slowly"


# -- clusters that this process starts -------------------------------------------------------------

# Dask's HTTP servers ask for no proof.
NO_PAGES: dict[str, Any] = {
    f"distributed.{each}.http.routes": [] for each in ("scheduler", "worker")
}


def publish(address: str, security: Any) -> Callable[[], None]:
    """Let this user's processes on this host find the certificate; return how to end that."""
    path = _file_of(address)
    fields = {"certificate": security.tls_client_cert, "key": security.tls_client_key}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a cluster that was killed and had the same port
        # A new file, which no other user can have opened before or put a link in its place.
        with open(path, "x", opener=functools.partial(os.open, mode=0o600)) as file:
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
    try:
        fields = json.loads(_file_of(address).read_text(encoding="utf-8"))
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
