"""Guests of a store, over the wire."""

from __future__ import annotations

import socket

from nbelastic.collectives.store import ERROR, GREETING, LENGTH, MAGIC, VALUES, request
from tests.collectives.worlds import PATIENCE_S

SECRET = b"known to the job"
NONCE = b"n" * 16


def approach(address):
    """Connect, and return the connection and the store's challenge."""
    connection = socket.create_connection(address, PATIENCE_S)
    magic, challenge = GREETING.unpack(read(connection, GREETING.size))
    assert magic == MAGIC
    return connection, challenge


def visit(store, room=None, rank=0, size=1, value=b"", secret=SECRET):
    """Connect, and bring a value to a room, if one is given."""
    connection, challenge = approach(store.address)
    if room is not None:
        asked = {"room": room, "rank": rank, "size": size, "value": value}
        connection.sendall(request(secret, challenge, NONCE, **asked))
    return connection


def say(store, message):
    connection, _ = approach(store.address)
    connection.sendall(message)
    return connection


def read(connection, length):
    data = b""
    while len(data) < length:
        piece = connection.recv(length - len(data))
        assert piece, "hung up"
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


def hung_up(connection):
    with connection:
        try:
            while connection.recv(1000):
                pass
        except ConnectionResetError:
            pass
        return True
