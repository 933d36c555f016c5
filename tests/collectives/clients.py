"""Clients of a rendezvous server, over the wire."""

from __future__ import annotations

import socket

from nbelastic.collectives.rendezvous.handshake import GREETING, MAGIC, encode_request
from nbelastic.collectives.rendezvous.server import ERROR, LENGTH, PURPOSE, VALUES, encode_body
from tests.collectives.worlds import PATIENCE_S

SECRET = b"known to the job"
NONCE = b"n" * 16


def request(secret, challenge, key, rank, size, value):
    return encode_request(secret, PURPOSE, challenge, NONCE, encode_body(key, rank, size, value))


def approach(address):
    """Connect, and return the connection and the server's challenge."""
    connection = socket.create_connection(address, PATIENCE_S)
    magic, challenge = GREETING.unpack(read(connection, GREETING.size))
    assert magic == MAGIC
    return connection, challenge


def join(server, key=None, rank=0, size=1, value=b"", secret=SECRET):
    """Connect, and send a value under a key, if one is given."""
    connection, challenge = approach(server.address)
    if key is not None:
        connection.sendall(request(secret, challenge, key, rank, size, value))
    return connection


def send(server, message):
    """Connect, and send whatever it is."""
    connection, _ = approach(server.address)
    connection.sendall(message)
    return connection


def read(connection, length):
    data = b""
    while len(data) < length:
        piece = connection.recv(length - len(data))
        assert piece, "closed"
        data += piece
    return data


def field(connection):
    return read(connection, LENGTH.unpack(read(connection, LENGTH.size))[0])


def values(connection, size):
    with connection:
        assert read(connection, 1) == VALUES
        return [field(connection) for _ in range(size)]


def refusal(connection):
    with connection:
        assert read(connection, 1) == ERROR
        return field(connection).decode()


def closed(connection):
    with connection:
        try:
            while connection.recv(1000):
                pass
        except ConnectionResetError:
            pass
        return True
