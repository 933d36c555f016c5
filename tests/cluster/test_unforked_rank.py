"""A rank that is to end before its rank server has forked it."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil

from nbelastic.cluster.worker.rank_process import RankServer


def test_a_rank_that_is_not_forked_yet_ends_without_its_server():
    async def scenario() -> None:
        server = RankServer()
        server.start()
        assert server.pid is not None
        process = psutil.Process(server.pid)
        os.kill(server.pid, signal.SIGSTOP)  # as one that is importing
        try:
            rank = server.launch(lambda message: None, lambda output: None)
            rank.send_signal(signal.SIGTERM, "it is to end")
            assert str(await asyncio.wait_for(rank.wait(), 30)) == "it is to end"
            os.kill(server.pid, signal.SIGCONT)
            later = server.launch(lambda message: None, lambda output: None)
            while later.pid is None:
                await asyncio.sleep(0.01)
            later.send_signal(signal.SIGKILL)
            assert "SIGKILL" in str(await asyncio.wait_for(later.wait(), 30))
            while process.children():  # of the first, too
                await asyncio.sleep(0.01)
        finally:
            server.close()

    asyncio.run(asyncio.wait_for(scenario(), 90))
