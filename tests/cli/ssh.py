"""An ssh server on addresses of this machine, and hosts that are no such thing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncssh

if TYPE_CHECKING:
    from typing_extensions import Self


class SshHosts:
    """asyncssh's own server, in a thread, on several addresses with one port.

    `home` gets the keys and the known hosts; `silent` addresses accept and never answer.
    """

    def __init__(self, home: Path, hosts: tuple[str, ...], silent: tuple[str, ...] = ()) -> None:
        self.port = _free_port()
        self.key = home / "key"
        self.commands: list[str] = []
        self._home = home
        self._hosts = hosts
        self._silent = silent
        self._processes: dict[str, list[asyncio.subprocess.Process]] = {}
        self._connections: dict[str, list[asyncssh.SSHServerConnection]] = {}
        self._loop = asyncio.new_event_loop()
        self._over: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._over is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    def die(self, host: str) -> None:
        """Have a host vanish with all that runs there; it accepts new connections."""
        self._loop.call_soon_threadsafe(self._end, host)

    def _end(self, host: str) -> None:
        for process in self._processes.pop(host, []):
            _kill(process)
        for connection in self._connections.pop(host, []):
            connection.abort()

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        host_key = asyncssh.generate_private_key("ssh-ed25519")
        user_key = asyncssh.generate_private_key("ssh-ed25519")
        user_key.write_private_key(str(self.key))
        self.key.chmod(0o600)
        authorized = self._home / "authorized"
        user_key.write_public_key(str(authorized))
        (self._home / ".ssh").mkdir()
        public = host_key.export_public_key().decode().strip()
        known = [f"[{host}]:{self.port} {public}\n" for host in (*self._hosts, *self._silent)]
        (self._home / ".ssh" / "known_hosts").write_text("".join(known))
        async with contextlib.AsyncExitStack() as stack:
            for host in self._hosts:
                keys = {"server_host_keys": [host_key], "authorized_client_keys": str(authorized)}
                server = await asyncssh.listen(host, self.port, process_factory=self._run, **keys)
                await stack.enter_async_context(server)
            for host in self._silent:
                silent = await asyncio.start_server(_never_answer, host, self.port)
                await stack.enter_async_context(silent)
            self._ready.set()
            await self._over.wait()
            for host in self._hosts:
                self._end(host)
            running = asyncio.all_tasks() - {asyncio.current_task()}
            if running:
                await asyncio.wait(running, timeout=10)

    async def _run(self, process: asyncssh.SSHServerProcess[Any]) -> None:
        """Run a command for a client, until it ends or the client goes away."""
        host = process.get_extra_info("sockname")[0]
        self.commands.append(process.command or "")
        self._connections.setdefault(host, []).append(process.channel.get_connection())
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_shell(
            process.command or "", stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self._processes.setdefault(host, []).append(child)
        await process.redirect(child.stdin, child.stdout, child.stderr)
        ends = [asyncio.ensure_future(each) for each in (child.wait(), process.wait_closed())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            _kill(child)
            await ends[0]
        with contextlib.suppress(OSError):
            await process.stderr.drain()
            process.exit(child.returncode or 0)


async def _never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
