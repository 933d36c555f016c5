"""Dask Gateway's own code in the scheduler, with a stand-in for its server."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.clusters import a_crew, until

from .planned import a_job_that_loses_nothing, shrinks

pytest.importorskip("dask_gateway")

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

TOKEN = "secret"


class GatewayServer:
    """What a scheduler needs of Gateway's server: it takes heartbeats, and sends orders."""

    def __init__(self, url):
        self.url = url
        self.heartbeats = []

    def last(self):
        return self.heartbeats[-1] if self.heartbeats else {"count": None, "closed_workers": []}

    def order(self, op, **options):
        """Send an order to the address that the scheduler has reported."""
        until(lambda: self.heartbeats, "the first heartbeat")
        request = urllib.request.Request(
            f"{self.last()['api_address']}/api/comm",
            json.dumps({"op": op, **options}).encode(),
            {"Authorization": f"token {TOKEN}", "Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=60).close()


@contextlib.contextmanager
def a_gateway():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known = self.headers["Authorization"] == f"token {TOKEN}"
            if known and self.path == "/v1/clusters/one/heartbeat":
                gateway.heartbeats.append(json.loads(body))
            self.send_response_only(200 if known else 403)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    gateway = GatewayServer(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield gateway
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


PRELOAD = {
    "preload": ["dask_gateway.scheduler_preload"],
    "preload_argv": ["--dg-api-address", "127.0.0.1:0", "--dg-heartbeat-period", "1"],
}


def test_it_asks_for_what_jobs_want_and_scales_down_as_planned(tmp_path, monkeypatch):
    with a_gateway() as gateway:
        monkeypatch.setenv("DASK_GATEWAY_CLUSTER_NAME", "one")
        monkeypatch.setenv("DASK_GATEWAY_API_TOKEN", TOKEN)
        monkeypatch.setenv("DASK_GATEWAY_API_URL", gateway.url)
        with a_crew(n_workers=0, scheduler_kwargs=PRELOAD) as crew:
            gateway.order("scale", count=2)
            until(lambda: gateway.last()["count"] == 2, "it asks for two workers")
            crew.cluster.scale(2)
            crew.client.wait_for_workers(2, timeout=120)
            with a_job_that_loses_nothing(crew, tmp_path, [2, 1], max_np=5) as job:
                names = {rank.name for rank in job.status.ranks}
                gateway.order("adapt", minimum=1, maximum=9)
                until(lambda: gateway.last()["count"] == 5, "it asks for what the job wants")
                gateway.order("scale", count=1)
                shrinks(job, 1)
                (left,) = names - {rank.name for rank in job.status.ranks}
            closed = until(lambda: gateway.last()["closed_workers"], "it reports that one has gone")
            closing = {name for beat in gateway.heartbeats for name in beat["closing_workers"]}
        assert [str(name) for name in closed] == [left]
        assert closing == set(closed)
