"""The first process of a host: it makes the host's only network card, and then holds the host up.

Run by :mod:`.network` in new network, process and mount namespaces. The card is a TUN device: what
is sent into it comes out of a file, which is handed over, by a socket, to whoever plays the cable.
When that socket closes, this process ends, and with it, since it is number 1, every other process
of the host.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _plug_in(address: str, mtu: str) -> int:
    card = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(card, TUNSETIFF, struct.pack("16sH22x", b"net0", IFF_TUN | IFF_NO_PI))
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "addr", "add", f"{address}/24", "dev", "net0")
    _run("ip", "link", "set", "net0", "up", "mtu", mtu)
    return card


def main() -> None:
    """Say who this is and hand over the card, or say what is wrong; then wait for the end."""
    number, address, mtu = sys.argv[1:]
    with socket.socket(fileno=int(number)) as line:
        # /proc is still that of the machine: it knows by what number others know this process.
        outer = os.readlink("/proc/self")
        try:
            card = _plug_in(address, mtu)
            _run("mount", "-t", "proc", "proc", "/proc")
            with contextlib.suppress(OSError):  # kernels without it number from 1, as others do
                # Numbers of processes that differ from host to host, as on real machines.
                last = int(address.rpartition(".")[2]) * 1000
                with open("/proc/sys/kernel/ns_last_pid", "w", encoding="ascii") as file:
                    file.write(str(last))
        except (OSError, subprocess.CalledProcessError) as error:
            line.sendall(f"!{error}".encode())
            return
        socket.send_fds(line, [outer.encode()], [card])
        os.close(card)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody else buries orphans here
        line.recv(1)


if __name__ == "__main__":
    main()
