"""A transport as another package may bring it: each operation is an exchange at the rendezvous."""

import functools
import pickle
from collections import Counter
from dataclasses import replace

import torch

from nbelastic.collectives import Op
from nbelastic.collectives.abort_signal import AbortSignal
from nbelastic.collectives.operations import (
    AsyncCommunicator,
    OperationHandle,
    OrderedExecutor,
    abortable,
)
from nbelastic.collectives.rendezvous.client import RendezvousClient

ADD = {Op.MIN: torch.minimum, Op.MAX: torch.maximum, Op.PRODUCT: torch.mul}


class OwnTransport(AsyncCommunicator):
    name = "own"

    def __init__(self, rendezvous):
        super().__init__(rendezvous, AbortSignal())
        self._executors, self._counts = {}, Counter()

    def connect(self):
        self.begin_barrier().wait()
        return self

    def close(self):
        self.abort("the communicator is closed")

    def _exchange(self, its, what, tensors, fill):
        self.check()
        self._counts[what] += 1
        executor = self._executors.setdefault(what, OrderedExecutor(f"own-{what}", its.timeout_s))
        client = RendezvousClient(its, f"{what}-{self._counts[what]}")
        self.on_abort(lambda *_: client.abort())

        def perform():
            parts = client.exchange(pickle.dumps([each.clone() for each in tensors]))
            fill([pickle.loads(each) for each in parts])

        return OperationHandle(self, executor.submit(abortable(self._abort_signal, perform)))

    def _message(self, source, to, tensors, fill):
        its = replace(self._rendezvous, size=2, rank=int(self.rank == to))
        return self._exchange(its, f"{source}-to-{to}", tensors, fill)

    def begin_allreduce(self, tensors, op):
        return self.begin_reduce_scatter(tensors[0], tensors * self.size, op)

    def begin_broadcast(self, tensor, root):
        def fill(parts):
            tensor.copy_(parts[root][0])

        return self._exchange(self._rendezvous, "all", [tensor], fill)

    def begin_allgather(self, outputs, tensor):
        return self.begin_all_to_all(outputs, [tensor] * self.size)

    def begin_reduce_scatter(self, output, inputs, op):
        def fill(parts):
            total = functools.reduce(ADD.get(op, torch.add), [each[self.rank] for each in parts])
            output.copy_(total / self.size if op is Op.AVERAGE else total)

        return self._exchange(self._rendezvous, "all", inputs, fill)

    def begin_all_to_all(self, outputs, inputs):
        def fill(parts):
            for output, each in zip(outputs, parts, strict=True):
                output.copy_(each[self.rank].view(output.shape))

        return self._exchange(self._rendezvous, "all", inputs, fill)

    def begin_barrier(self):
        return self._exchange(self._rendezvous, "all", [], lambda _: None)

    def begin_send(self, parts, to):
        return self._message(self.rank, to, [torch.cat(list(parts))], lambda _: None)

    def begin_receive(self, tensor, source):
        def fill(parts):
            tensor.view(-1).copy_(parts[0][0])

        return self._message(source, self.rank, [], fill)
