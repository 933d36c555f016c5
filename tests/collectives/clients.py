"""Clients of a rendezvous server, over the wire."""

import socket

import msgspec

from nbelastic.collectives.rendezvous.handshake import (
    GREETING,
    LENGTH,
    MAGIC,
    PROOF_BYTES,
    MessageChannel,
    read,
)
from tests.collectives.worlds import PATIENCE_S

SECRET = b"known to the job"
NONCE = b"n" * 16


class Recorder:
    """A connection that keeps what is sent."""

    def __init__(self):
        self.sent = b""

    def sendall(self, data):
        self.sent += data


def messages(secret, challenge, *bodies):
    """Return a client's nonce and first messages."""
    connection = Recorder()
    channel = MessageChannel(connection, secret, challenge + NONCE, serves=False)
    for body in bodies:
        channel.send(body)
    return connection.sent


def request(secret, challenge, key, rank, size, value):
    """Return a client's nonce, and the messages by which it enters and gives a value."""
    bodies = [(key, rank, size), {"do": "exchange", "value": value}]
    return messages(secret, challenge, *map(msgspec.msgpack.encode, bodies))


def approach(address):
    """Connect to a server; return the connection and its challenge."""
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


def reply(connection):
    with connection:
        body = read(connection, LENGTH.unpack(read(connection, LENGTH.size))[0])
        read(connection, PROOF_BYTES)
        return msgspec.msgpack.decode(body)


def values(connection, size):
    found = reply(connection)["values"]
    assert len(found) == size
    return found


def refusal(connection):
    found = reply(connection)
    return f"rank {found['rank']} left" if found["do"] == "gone" else found["reason"]


def turned_away(connection):
    """Return whether a connection ends without an answer."""
    with connection:
        try:
            return connection.recv(100) == b""
        except ConnectionResetError:
            return True
