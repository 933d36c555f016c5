"""Wrong arguments: refused before anything is sent, and the communicator stays whole."""

import torch

from nbelastic.collectives import Op

ONE, CROOKED = torch.ones(2), torch.ones(4, 3).t()
WHOLE, SHORT, COMPLEX = (torch.ones(2, dtype=t) for t in (torch.int32, torch.int16, torch.cfloat))


def each(c, tensor=ONE):
    return [tensor.clone() for _ in range(c.size)]


WRONG = {
    "crooked allreduce": lambda c: c.allreduce_async(CROOKED),
    "average of integers": lambda c: c.allreduce_async(WHOLE, Op.AVERAGE),
    "average of truths": lambda c: c.allreduce_async(WHOLE.bool(), Op.AVERAGE),
    "sum of int16": lambda c: c.allreduce_async(SHORT),
    "sum of complex": lambda c: c.allreduce_async(COMPLEX),
    "tensors of several types": lambda c: c.allreduce_coalesced_async([ONE, WHOLE]),
    "int16 in many places": lambda c: c.allreduce_coalesced_async([SHORT, SHORT.clone()]),
    "crooked broadcast": lambda c: c.broadcast_async(CROOKED),
    "root too large": lambda c: c.broadcast_async(ONE, c.size),
    "root negative": lambda c: c.broadcast_async(ONE, -1),
    "too few outputs": lambda c: c.allgather_async(each(c)[1:], ONE),
    "too many outputs": lambda c: c.allgather_async([*each(c), ONE], ONE),
    "output of another shape": lambda c: c.allgather_async(each(c, torch.ones(3)), ONE),
    "output of another type": lambda c: c.allgather_async(each(c, ONE.double()), ONE),
    "crooked outputs": lambda c: c.allgather_async([CROOKED] * c.size, torch.ones(3, 4)),
    "crooked gathered": lambda c: c.allgather_async(each(c, torch.ones(3, 4)), CROOKED),
    "too few inputs": lambda c: c.reduce_scatter_async(ONE.clone(), each(c)[1:]),
    "crooked part": lambda c: c.reduce_scatter_async(CROOKED, each(c, torch.ones(3, 4))),
    "part of another shape": lambda c: c.reduce_scatter_async(torch.ones(3), each(c)),
    "scattered average": lambda c: c.reduce_scatter_async(WHOLE, each(c, WHOLE), Op.AVERAGE),
    "too few to exchange": lambda c: c.all_to_all_async(each(c), each(c)[1:]),
    "too few places": lambda c: c.all_to_all_async(each(c)[1:], each(c)),
    "own part of another shape": lambda c: c.all_to_all_async(each(c), each(c, torch.ones(3))),
    "crooked message": lambda c: c.send_async(CROOKED, (c.rank + 1) % 2),
    "crooked place for one": lambda c: c.receive_async(CROOKED, (c.rank + 1) % 2),
    "message to oneself": lambda c: c.send_async(ONE, c.rank),
    "message to nobody": lambda c: c.send_async(ONE, c.size),
    "message from oneself": lambda c: c.receive_async(ONE.clone(), c.rank),
    "message from nobody": lambda c: c.receive_async(ONE.clone(), c.size),
}


def test_wrong_arguments_are_refused_and_do_no_harm(world):
    def refused(communicator, wrong):
        try:
            wrong(communicator)
        except ValueError as error:
            return len(str(error)) >= 20
        return False

    def rank_main(communicator):
        before = communicator.completed
        if communicator.rank == 0:  # the others go straight to what is right
            assert [name for name, wrong in WRONG.items() if not refused(communicator, wrong)] == []
        assert communicator.completed == before
        tensor = torch.ones(3)
        communicator.allreduce(tensor)
        return tensor.tolist()

    assert world.run(rank_main) == [[world.size] * 3] * world.size
