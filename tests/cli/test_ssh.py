"""Hosts over ssh: those that answer, refuse, hang, and die in the middle."""

from __future__ import annotations

import asyncio
import threading

import dask
import pytest

from nbelastic.cli.hosts.worker import SshWorker
from tests.support.clusters import until

from .ssh import SshHosts
from .stage import Stage

pytestmark = pytest.mark.slow

GOOD, DYING, REFUSING, SILENT = "127.0.0.2", "127.0.0.5", "127.0.0.3", "127.0.0.4"


def test_ranks_train_on_hosts_over_ssh_whatever_other_hosts_do(stage: Stage, monkeypatch):
    monkeypatch.setenv("HOME", str(stage.folder))
    hosts = ",".join(f"{host}:1" for host in (GOOD, DYING, REFUSING, SILENT))
    with SshHosts(stage.folder, (GOOD, DYING), (SILENT,)) as servers:

        def kill_in_the_middle() -> None:
            until(lambda: stage.epochs() == [2], "an epoch of two ranks", 120)
            servers.die(DYING)

        killer = threading.Thread(target=kill_in_the_middle)
        killer.start()
        ended = stage.run(
            *("-H", hosts, "-np", "2", "--min-np", "1", "--blacklist-cooldown", "0.1", "0.2"),
            *("-p", str(servers.port), "-i", str(servers.key)),
            sizes="2,1,2",
        )
        killer.join()
    assert ended.code == 0
    assert stage.epochs() == [2, 1, 2]
    assert len(ended.events("lost")) == 1
    assert f"{REFUSING}:0: " in ended.messages
    assert f"{DYING}:0: Connection lost; trying again in 1 s" in ended.messages
    assert "sent with the job: 2 files" in ended.messages
    assert all("distributed.cli.dask_spec" in command for command in servers.commands)


@pytest.fixture
def worker_ends(tmp_path, monkeypatch):
    """Start a program in place of Python on a host; return why its worker has ended."""
    monkeypatch.setenv("HOME", str(tmp_path))
    program = tmp_path / "python"

    async def scene(servers: SshHosts) -> str:
        over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        worker = SshWorker(
            "tcp://10.0.0.5:8786",
            host=GOOD,
            slots=1,
            connect={"port": servers.port, "client_keys": [str(servers.key)]},
            python=str(program),
            configuration=dask.config.global_config,
            tell=over.set_result,
            name=f"{GOOD}:0",
        )
        await worker.start()
        try:
            return await asyncio.wait_for(over, 20)
        finally:
            await worker.close()

    def run(text: str) -> str:
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o700)
        with SshHosts(tmp_path, (GOOD,)) as servers:
            found = asyncio.run(scene(servers))
            run.commands = servers.commands
        return found

    return run


def test_what_a_worker_prints_does_not_stop_its_log(worker_ends):
    text = "echo worker at >&2; yes $(printf %01000d) | head -c 6000000; echo all is printed >&2"
    again = "trying again in 1 s"
    assert worker_ends(text) == f"{GOOD}:0: its worker has ended: all is printed; {again}"


def test_configuration_does_not_stand_in_the_command(worker_ends, tmp_path):
    """Every user of a host sees the commands of all; the configuration may hold a password."""
    with dask.config.set({"gateway.auth.kwargs.password": "sesame " * 1000}):
        config = dask.config.serialize(dask.config.global_config)
        text = f'printf %s "$DASK_INTERNAL_INHERIT_CONFIG" > {tmp_path}/config; echo "$3" >&2'
        assert "tcp://10.0.0.5:8786" in worker_ends(text)
    assert (tmp_path / "config").read_text() == config
    assert all(config[:100] not in command for command in worker_ends.commands)
