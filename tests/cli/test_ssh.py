"""Hosts over ssh: those that answer, refuse, hang, and die in the middle."""

from __future__ import annotations

import threading

import pytest

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
