"""Copies are right wherever they begin and end, and touch nothing else."""

import itertools
import os
import threading

import pytest
import torch

from nbelastic.native import core

ROOM = 3 * 4096


@pytest.mark.parametrize("far", [False, True])
def test_bytes_arrive_wherever_source_and_target_begin(far):
    source = torch.randint(0, 256, (ROOM,), dtype=torch.uint8)
    target = torch.empty(ROOM, dtype=torch.uint8)
    lengths = (0, 1, 63, 64, 65, 2048, 2049, 2112, 4099, 8191)
    for begin, length in itertools.product((0, 5, 64), lengths):
        for ahead in (*range(70), 127, 128, 4000, 4033):
            target.fill_(7)
            at = (source.data_ptr() + begin + ahead - target.data_ptr()) % 4096
            end = at + length
            core.copy(target.data_ptr() + at, source.data_ptr() + begin, length, far)
            assert torch.equal(target[at:end], source[begin : begin + length])
            assert (target[:at] == 7).all()
            assert (target[end:] == 7).all()


def test_messages_arrive_wherever_in_the_ring_they_begin():
    fd = core.create(2)
    groups = [core.Group(fd, rank, 2, 20.0) for rank in range(2)]
    os.close(fd)
    sent = torch.randint(0, 256, (400_001,), dtype=torch.uint8)
    got = torch.empty_like(sent)
    for skipped in range(40):
        parts = [(sent.data_ptr(), skipped), (sent.data_ptr() + skipped, len(sent) - skipped)]
        thread = threading.Thread(target=groups[0].send, args=(parts, 1))
        thread.start()
        got.zero_()
        groups[1].receive(got.data_ptr(), len(got), 0)
        thread.join()
        assert torch.equal(got, sent)
    for group in groups:
        group.close()
