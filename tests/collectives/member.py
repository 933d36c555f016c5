"""A rank in a process of its own, controlled over its standard input.

Each line is a request, ``[number, verb, arguments]``; each line of output an answer,
``[number, "ok" or "error", value]``. Requests that may block are served by the rank's thread, in
order; the others at once.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading

import torch

from nbelastic.collectives import Op, Rendezvous
from nbelastic.collectives.reduction_tree import Blocks
from nbelastic.collectives.shm import handshake
from tests.collectives import worlds
from tests.collectives.fake_device import FakeDevice
from tests.collectives.fake_nccl import LateNcclDevice
from tests.collectives.worlds import MAKERS


class Member:
    """The requests that it serves."""

    at_once = ("make", "die_at", "fail_nccl", "in_nccl", "abort", "waiting", "threads")
    communicator = None

    def make(self, kind, store, **rendezvous):
        """Make a communicator, which can be aborted from now on."""
        self.previous = self.communicator
        self.communicator = MAKERS[kind](Rendezvous(store=tuple(store), **rendezvous))

    def connect(self):
        if self.previous is not None:
            self.previous.close()
        self.communicator = self.communicator.connect()

    def allreduce(self, length):
        tensor = torch.full((length,), 1.0 + self.communicator.rank)
        self.communicator.allreduce(tensor, Op.SUM)
        assert (tensor == tensor[0]).all()
        return tensor[0].item()

    def sum_along_tree(self, length, leaves):
        """Return the sum of the leaves' numbers, of which this rank has those of its block."""
        blocks = Blocks.even(leaves, self.communicator.size)
        nodes = [
            [torch.full((length,), float(sum(range(*node))))]
            for node in blocks.covers[self.communicator.rank]
        ]
        output = torch.full((length,), -1.0)
        self.communicator.allreduce_tree(nodes, blocks, [output])
        assert (output == output[0]).all()
        return output[0].item()

    def die_when_forming(self):
        """Be killed, in time to come, in the middle of forming a segment."""
        for name in ("create", "join"):
            setattr(handshake.SegmentSocket, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    def die_at(self, drain):
        """Be killed, in time to come, when the host waits for the device for that time."""
        worlds.fake_device = lambda _rank: FakeDevice(dies_at=drain)
        worlds.hosts_device = lambda _rank: LateNcclDevice(dies_at=drain)

    def fail_nccl(self, what):
        """Have the fake of NCCL fail."""
        os.environ["FAKE_NCCL"] = what

    def in_nccl(self):
        """Return whether an operation has been handed to NCCL, and has not ended."""
        return bool(self.communicator._group._lent)

    def abort(self, reason):
        self.communicator.abort(reason)

    def waiting(self):
        return self.communicator.waiting

    def threads(self):
        return [thread.name for thread in threading.enumerate()]


def serve(member, requests, answer):
    while True:
        number, verb, arguments = requests.get()
        answer(member, number, verb, arguments)


def main():
    torch.set_num_threads(1)
    member = Member()
    requests = queue.SimpleQueue()
    lock = threading.Lock()

    def answer(member, number, verb, arguments):
        try:
            reply = [number, "ok", getattr(member, verb)(**arguments)]
        except Exception as error:
            reply = [number, "error", f"{type(error).__name__}: {error}"]
        with lock:
            sys.stdout.write(json.dumps(reply) + "\n")
            sys.stdout.flush()

    threading.Thread(target=serve, args=(member, requests, answer), daemon=True).start()
    for line in sys.stdin:
        request = json.loads(line)
        if request[1] in Member.at_once:
            answer(member, *request)
        else:
            requests.put(request)


if __name__ == "__main__":
    main()
