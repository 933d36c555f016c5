"""Several hosts on this machine, and the cables between them, which can be cut.

A host is a set of namespaces: a network with one card, processes of its own (killing the first one
kills all), and mounts. The network needs no bridge, no veth and no name: each card is a TUN device,
and one thread of the test carries the packets from card to card. So every packet passes through a
few lines of Python, which can lose it or keep it for a while, in one direction or in both, between
any two hosts, on any kernel. When the test's process ends, however it does, everything is gone.

As a program this is the first process of a host: it makes the card, hands it over by a socket, and
holds the host up until that socket closes. Being number 1, it ends all others with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import functools
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MTU = 9000
NETWORK = "10.77.0"
ROOT = Path(__file__).resolve().parents[2]
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000


@dataclass(frozen=True)
class Link:
    """What happens to packets from one host to another."""

    up: bool = True
    delay: float = 0.0
    loss: float = 0.0


_GOOD = Link()


class Host:
    """A machine with a name, an address and a card in it."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.alive = True
        self._line, inside = socket.socketpair()
        self._processes: list[subprocess.Popen[Any]] = []
        with inside:
            self._holder = subprocess.Popen(
                [
                    *("unshare", "--net", "--pid", "--mount", "--fork", "--kill-child=SIGKILL"),
                    *(sys.executable, __file__, str(inside.fileno()), address),
                ],
                pass_fds=[inside.fileno()],
                stderr=subprocess.PIPE,
                text=True,
            )
        message, cards, _, _ = socket.recv_fds(self._line, 1024, 1)
        if not cards:
            self._line.close()
            _, said = self._holder.communicate()
            raise OSError(message[1:].decode() or said.strip() or "the host did not come up")
        self.card = cards[0]
        self._first = int(message)

    def popen(self, command: Iterable[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the host, in the root of this repository."""
        enter = ["nsenter", f"--target={self._first}", "--net", "--pid", "--mount", f"--wd={ROOT}"]
        process = subprocess.Popen([*enter, *command], **options)
        self._processes.append(process)
        return process

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Give this thread, and threads that it starts, the network of the host."""
        networks = ("/proc/thread-self/ns/net", f"/proc/{self._first}/ns/net")
        here, there = (os.open(each, os.O_RDONLY | os.O_CLOEXEC) for each in networks)
        try:
            _enter(there)
            yield
        finally:
            _enter(here)
            os.close(here)
            os.close(there)

    def kill(self) -> None:
        """Send SIGKILL to every process on the host, and wait until they are gone."""
        if not self.alive:
            return
        self.alive = False
        os.kill(self._first, signal.SIGKILL)
        for process in [*self._processes, self._holder]:
            process.wait(timeout=20)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._line.close()


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


class Network:
    """Hosts by name, and what is between them; made by :func:`a_network`."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self.lost = 0
        self._links: dict[tuple[bytes, bytes], Link] = {}
        self._cards: dict[bytes, int] = {}  # by address
        self._chance = random.Random(0)
        self._cables = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._cables.run_forever, name="cables", daemon=True)
        self._thread.start()

    def add(self, name: str) -> None:
        """Make a host, or put a new one where a killed one was, with nothing but its address."""
        old = self.hosts.get(name)
        assert old is None or not old.alive
        address = f"{NETWORK}.{len(self.hosts) + 1}" if old is None else old.address
        host = self.hosts[name] = Host(name, address)
        self._cables.call_soon_threadsafe(self._plug_in, socket.inet_aton(address), host.card)

    def close(self) -> None:
        """Take everything down. Nothing is left."""
        for host in self.hosts.values():
            host.kill()
        self._cables.call_soon_threadsafe(self._cables.stop)
        self._thread.join()
        self._cables.close()
        for card in self._cards.values():
            os.close(card)

    # -- what can be done to it ------------------------------------------------------------------

    def set(self, one: str, other: str | None, link: Link, directions: str = "both") -> None:
        """Change what happens to packets between a host and another one, or all others.

        Directions: ``from`` the first host, ``to`` it, or ``both``.
        """
        for each in [name for name in self.hosts if name != one] if other is None else [other]:
            ends = [socket.inet_aton(self.hosts[name].address) for name in (one, each)]
            if directions != "to":
                self._links[ends[0], ends[1]] = link
            if directions != "from":
                self._links[ends[1], ends[0]] = link

    def cut(self, one: str, other: str | None = None, directions: str = "both") -> None:
        """Cut a host off from another one, or all: packets vanish, and nobody is told."""
        self.set(one, other, Link(up=False), directions)

    def heal(self) -> None:
        """Make all connections whole and fast again."""
        self._links.clear()

    # -- in the thread that carries packets ------------------------------------------------------

    def _plug_in(self, address: bytes, card: int) -> None:
        if (old := self._cards.get(address)) is not None:
            self._cables.remove_reader(old)
            os.close(old)
        self._cards[address] = card
        self._cables.add_reader(card, self._carry, card)

    def _carry(self, source: int) -> None:
        """Carry what a host has sent; anything but IPv4 is noise."""
        try:
            packet = os.read(source, 1 << 16)
        except OSError:  # the host is dead
            self._cables.remove_reader(source)
            return
        if packet[0] >> 4 == 4:
            link = self._links.get((packet[12:16], packet[16:20]), _GOOD)
            if not link.up or self._chance.random() < link.loss:
                self.lost += 1
            elif link.delay:
                self._cables.call_later(link.delay, self._deliver, packet)
            else:
                self._deliver(packet)

    def _deliver(self, packet: bytes) -> None:
        with contextlib.suppress(KeyError, OSError):  # a card that is full or dead loses packets
            os.write(self._cards[packet[16:20]], packet)


@contextlib.contextmanager
def a_network(*names: str) -> Iterator[Network]:
    """Make hosts, and remove them with all that runs on them."""
    network = Network()
    try:
        for name in names:
            network.add(name)
        yield network
    finally:
        network.close()


@functools.cache
def why_not() -> str:
    """Return why hosts cannot be made on this machine; empty if they can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]
    if missing:
        return f"there is no {', '.join(missing)}"
    try:
        with a_network("a", "b") as network, network.hosts["a"].entered():
            socket.create_connection((network.hosts["b"].address, 1), timeout=5)
    except ConnectionRefusedError:
        return ""  # the other host has answered
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "something else answers"


# -- the first process of a host -------------------------------------------------------------------


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def _plug_in(address: str) -> int:
    card = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(card, TUNSETIFF, struct.pack("16sH22x", b"net0", IFF_TUN | IFF_NO_PI))
    _run("ip link set lo up")
    _run(f"ip addr add {address}/24 dev net0")
    _run(f"ip link set net0 up mtu {MTU}")
    return card


def main(number: str, address: str) -> None:
    """Say who this is and hand over the card, or say what is wrong; then wait for the end."""
    with socket.socket(fileno=int(number)) as line:
        # /proc is still that of the machine: it knows by what number others know this process.
        outer = os.readlink("/proc/self")
        try:
            card = _plug_in(address)
            _run("mount -t proc proc /proc")
            with contextlib.suppress(OSError):  # kernels without it number from 1, as others do
                # Numbers of processes that differ from host to host, as on real machines.
                last = int(address.rpartition(".")[2]) * 1000
                Path("/proc/sys/kernel/ns_last_pid").write_text(str(last))
        except (OSError, subprocess.CalledProcessError) as error:
            line.sendall(f"!{error}".encode())
            return
        socket.send_fds(line, [outer.encode()], [card])
        os.close(card)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody else buries orphans here
        line.recv(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
