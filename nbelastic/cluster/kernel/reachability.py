"""Check for a scheduler at an address, before a client waits for its answer.

A Dask client waits half a minute where nothing listens. It waits without end where
something else listens, such as a dashboard, because its handshake has no limit, and where a
scheduler that it is connected to has stopped.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import dask
from dask.utils import parse_timedelta
from distributed import Client
from distributed.comm.addressing import get_address_host_port, parse_address
from distributed.comm.core import connect
from distributed.core import send_recv
from distributed.security import Security
from distributed.utils import LoopRunner

from nbelastic.errors import ClusterLost, OptionError

CONNECT_WITHIN_S = 10.0  # seconds for a scheduler to answer, or Dask's own limit if that is less
FIRST_TRY_S = 1.0  # seconds before the user sees what is waited for

_KNOWN = ("tcp", "tls")
_OTHERS = ("inproc", "ucx", "ucxx", "ws", "wss", "gateway")


def check_scheduler(address: str, security: Any, tell: Callable[[str], None]) -> None:
    """Return once a scheduler has answered; `tell` takes a line where that takes longer.

    Raises OptionError where the address is no scheduler's, ClusterLost where none answers.
    Without `security`, the certificates for ``tls://`` are those of Dask's configuration.
    """
    scheme = _check_form(address)
    if scheme not in _KNOWN or not isinstance(security, Security | None):
        return
    try:
        terms: dict[str, Any] = (security or Security()).get_connection_args("client")
    except OSError as error:  # a file of the configuration is not there
        raise OptionError(
            f"cluster={address!r}: its certificates cannot be read: {error}"
        ) from None
    if scheme == "tls" and terms.get("ssl_context") is None:
        raise OptionError(
            f"cluster={address!r}: tls:// needs certificates; pass Client(address, "
            "security=Security(...)), or set them in Dask's configuration. A cluster that "
            "nbelastic has started is open to processes of its own user, on its own host"
        )
    configured = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"), "s")
    limit = min(float(configured), CONNECT_WITHIN_S)
    first = min(FIRST_TRY_S, limit)
    kind, problem, waits = _try(address, terms, first)
    if waits:
        tell(f"connecting to {address}: {problem} so far; trying for {limit:g} s")
        kind, problem, waits = _try(address, terms, max(limit - first, 0.1))
    if problem:
        after = f" for {limit:g} s" if waits else ""
        raise ClusterLost(
            f"cluster={address!r}: no scheduler answers there: {problem}{after}; "
            "check host and port, and that the scheduler runs"
        )
    if kind != "Scheduler":
        raise OptionError(
            f"cluster={address!r}: this is the address of a {kind.lower()}; "
            "must be that of the scheduler"
        )


def check_answers(client: Client, tell: Callable[[str], None]) -> None:
    """Return once the scheduler of a connected client has answered; else raise ClusterLost."""
    limit = float(parse_timedelta(dask.config.get("distributed.comm.timeouts.tcp"), "s"))
    first = min(FIRST_TRY_S, limit / 2)
    scheduler: Any = client.scheduler
    address = scheduler.address
    if client.sync(_echoes, scheduler, first):
        return
    tell(f"the scheduler at {address} does not answer so far; trying for {limit:g} s")
    if not client.sync(_echoes, scheduler, limit - first):
        raise ClusterLost(
            f"cluster: the scheduler has not answered for {limit:g} s, although it is connected; "
            f"check that it is not stopped or busy ({address})"
        )


async def _echoes(scheduler: Any, limit: float) -> bool:
    try:
        await asyncio.wait_for(scheduler.echo(), limit)
    except asyncio.TimeoutError:
        return False
    return True


def _check_form(address: str) -> str:
    """Return the scheme of an address."""
    wrong = f"cluster={address!r}: must be a scheduler's address, as in tcp://10.0.0.5:8786"
    scheme, place = parse_address(address)
    if scheme in ("http", "https"):
        raise OptionError(f"{wrong}; this is that of a web page, such as Dask's dashboard")
    if scheme not in _KNOWN + _OTHERS:
        raise OptionError(f"{wrong}; {scheme}:// is no protocol of Dask's")
    if scheme not in _KNOWN:
        return scheme
    try:
        _, port = get_address_host_port(f"{scheme}://{place}")
    except ValueError:
        port = 0
    if not 0 < port < 65536 or "/" in place or " " in place:
        file = "; for a file: Client(scheduler_file=...)" if place.endswith(".json") else ""
        raise OptionError(f"{wrong}{file}")
    return scheme


def _try(address: str, terms: dict[str, Any], limit: float) -> tuple[str, str, bool]:
    """Return the type of server at an address, or why none answers and whether to retry."""

    async def ask() -> Any:
        connecting: Any = connect(address, timeout=limit, **terms)
        comm = await connecting
        try:
            return await send_recv(comm, op="identity")
        finally:
            comm.abort()

    runner: Any = LoopRunner()
    try:  # connecting alone ends with its own reason
        found = runner.run_sync(asyncio.wait_for, ask(), limit + 0.1)
    except (asyncio.TimeoutError, TimeoutError):
        return "", "the connection is accepted, but nothing is answered", True
    except OSError as error:
        if "Timed out trying to connect" in str(error):  # Dask's reason is its last, short try's
            return "", _why_not_connected(address), True
        problem = f"it closed the connection (a scheduler with TLS needs tls://): {error}"
        return "", problem, False
    except Exception as error:  # whatever Dask makes of what has answered
        return "", f"what answers is no scheduler ({type(error).__name__})", False
    return str(found.get("type") if isinstance(found, dict) else None), "", False


def _why_not_connected(address: str) -> str:
    try:
        socket.create_connection(get_address_host_port(address), timeout=FIRST_TRY_S).close()
    except ConnectionRefusedError:
        return "nothing listens at this port"
    except socket.gaierror:
        return "the name of the host is unknown"
    except OSError as error:
        return f"the host does not answer ({error})"
    return "it answers too slowly"
