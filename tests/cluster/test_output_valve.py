"""Output that waits for a process which does not read: a bounded amount."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from distributed.comm import connect, listen

from nbelastic.cluster.dask_compat import unsent_bytes
from nbelastic.cluster.scheduler.records import FEW_WAITING, MOST_WAITING, OutputValve
from nbelastic.messages import RankOutput

TEXT = RankOutput("job", 0, "0123456789")
GAP = RankOutput("job", 0, "", gap=True)


def test_a_kernel_that_does_not_read_gets_the_mark_of_a_gap_and_then_nothing():
    valve = OutputValve()
    waiting = [0, MOST_WAITING, MOST_WAITING + 1, MOST_WAITING + 1, MOST_WAITING]
    assert [valve.take(TEXT, each) for each in waiting] == [TEXT, TEXT, GAP, None, None]


def test_a_kernel_that_has_read_most_gets_output_again():
    valve = OutputValve()
    waiting = [MOST_WAITING + 1, FEW_WAITING + 1, FEW_WAITING, MOST_WAITING, MOST_WAITING + 1]
    assert [valve.take(TEXT, each) for each in waiting] == [GAP, None, TEXT, TEXT, GAP]


def test_bytes_that_wait_for_the_other_end_are_counted():
    """Dask's streams write without waiting, so that their own buffers are empty."""

    async def scene():
        arrived: asyncio.Queue = asyncio.Queue()
        async with listen("tcp://127.0.0.1", arrived.put) as listener:
            writer = await connect(listener.contact_address)
            reader = await arrived.get()
            stream = SimpleNamespace(comm=writer)
            before = unsent_bytes(stream)
            await writer.write(b"x" * 50_000_000)
            await writer.write("done")
            waiting = unsent_bytes(stream)
            await reader.read()
            await reader.read()
            after = unsent_bytes(stream)
            await writer.close()
            await reader.close()
        return before, waiting > 25_000_000, after

    assert asyncio.run(scene()) == (0, True, 0)
    assert unsent_bytes(None) == unsent_bytes(SimpleNamespace(comm=None)) == 0
