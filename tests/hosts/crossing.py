"""Ranks on one host, in processes of their own, that meet those on others and try every operation.

Run with the host's address, its ranks and the size. Opens a store, unless it is told where there is
one; says where it is, and then, for each rank, what it has found.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import torch

from nbelastic.collectives import Op, Rendezvous, RendezvousServer, connect
from tests.collectives.test_operations import REDUCED, SHAPES, ops_of, part, reduced, same, values

TIMEOUT_S = 60.0
COUNT = 100_003


def check(communicator):
    """Compare what every operation gives with what it should."""
    me, size = communicator.rank, communicator.size
    ranks = range(size)
    for dtype in REDUCED:
        for op in ops_of(dtype):
            for shape in [*SHAPES, (COUNT,)]:
                tensor = values(me, shape, dtype)
                communicator.allreduce(tensor, op)
                same(tensor, reduced(op, [values(rank, shape, dtype) for rank in ranks]))
            output = torch.zeros(me, 3, dtype=dtype)
            communicator.reduce_scatter(output, [part(me, to, dtype) for to in ranks], op)
            same(output, reduced(op, [part(rank, me, dtype) for rank in ranks]))
        for root in ranks:
            tensor = values(me, (7,), dtype)
            communicator.broadcast(tensor, root)
            same(tensor, values(root, (7,), dtype))
        gathered = [torch.zeros(3, 5, dtype=dtype) for _ in ranks]
        communicator.allgather(gathered, values(me, (3, 5), dtype))
        exchanged = [torch.zeros(rank, me, dtype=dtype) for rank in ranks]
        inputs = [values(me, (me, to), dtype, to) for to in ranks]
        communicator.all_to_all(exchanged, inputs)
        sending = communicator.send_async(values(me, (5,), dtype), (me + 1) % size)
        received = torch.zeros(5, dtype=dtype)
        communicator.receive(received, (me - 1) % size)
        sending.wait()
        same(received, values((me - 1) % size, (5,), dtype))
        for rank in ranks:
            same(gathered[rank], values(rank, (3, 5), dtype))
            same(exchanged[rank], values(rank, (rank, me), dtype, me))
    communicator.barrier()


def average(communicator):
    """Return a digest of averages of numbers that depend on the order in which they are added."""
    digest = hashlib.sha256()
    for seed in range(3):
        generator = torch.Generator().manual_seed(10 * seed + communicator.rank)
        tensor = communicator.empty(COUNT, torch.float32)
        tensor.copy_(torch.randn(COUNT, generator=generator))
        handles = [communicator.allreduce_async(tensor, Op.AVERAGE) for _ in range(4)]
        for handle in handles:
            handle.wait()
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def rank_main(terms):
    """Be a rank, to the end of the process; an exception ends it otherwise."""
    torch.set_num_threads(1)
    communicator = connect(terms).connect()
    found = {"rank": terms.rank, "kind": communicator.name}
    check(communicator)
    found["digests"] = [average(communicator) for _ in range(2)]
    communicator.barrier()
    communicator.close()
    os.write(1, (json.dumps(found) + "\n").encode())  # at once: the ranks of a host share it
    os._exit(0)  # it takes seconds to take torch apart in a fork


def main():
    address, ranks, size = sys.argv[1:]
    told = sys.stdin.readline().strip()
    opened = None if told else RendezvousServer(address)
    where = tuple(json.loads(told)) if told else opened.address
    print(json.dumps(where), flush=True)
    children = []
    for rank in map(int, ranks.split(",")):
        child = os.fork()
        if child == 0:
            terms = {"rank": rank, "size": int(size), "store": where, "bind": address}
            rank_main(Rendezvous(job="crossing", generation=1, timeout_s=TIMEOUT_S, **terms))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if opened is not None:
        opened.close()
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
