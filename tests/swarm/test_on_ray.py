"""Hosts on a real Ray cluster of two nodes of this machine: started, killed, started again."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from dial_site import TOKEN, gateway, replayed, states

from layershuffle.gateway.hosts.on_ray import hosts_on_ray
from layershuffle.gateway.hosts.service import background
from waiting import STARTS

pytest.importorskip("ray", reason="needs the extra `ray`")


class SilentRay:
    """A cluster whose head starts again: it does not say which nodes are there, then it does."""

    def __init__(self):
        self.looks, self.killed = 0, []

    def remote(self, **options):
        return lambda kind: kind

    def nodes(self):
        self.looks += 1
        if self.looks == 1:
            raise ConnectionError("the head is gone")
        return []

    def kill(self, handle):
        self.killed.append(handle)

    def shutdown(self):
        pass


def test_a_cluster_that_does_not_answer_ends_nothing(monkeypatch):
    silent = SilentRay()
    monkeypatch.setattr("layershuffle.gateway.hosts.on_ray.connected_ray", lambda address: silent)
    monkeypatch.setattr("layershuffle.gateway.hosts.on_ray._LOOK", 0.01)

    async def main():
        async with background(hosts_on_ray("auto", url="ws://x", token=TOKEN, memory=1)):
            while silent.looks < 3:
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert silent.killed == []


@pytest.fixture
def cluster():
    """The address of a cluster of two nodes."""
    from ray.cluster_utils import Cluster

    # What only shows logs or asks for more nodes takes seconds to start.
    lean = {"num_cpus": 1, "include_log_monitor": False}
    head = {**lean, "include_dashboard": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**lean)
    yield cluster.address
    cluster.shutdown()


def hosts_of(cluster):
    """The processes of Ray's actors on the nodes of this cluster."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if (place / "cmdline").read_text().startswith("ray::RayHost"):
                parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
                if cluster in Path(f"/proc/{parent}/cmdline").read_text():
                    found.append(int(place.name))
    return found


def test_a_host_on_every_node_that_ray_starts_again(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    async def main():
        async with gateway() as site:
            async with background(hosts_on_ray(cluster, url=site.url, token=TOKEN, memory=10**8)):
                await site.until(lambda: min(site.copies()) == 2, seconds=STARTS)
                assert len(site.connected) == 2
                workers = hosts_of(cluster)
                assert len(workers) == 2
                os.kill(workers[0], signal.SIGKILL)
                await site.until(lambda: len(site.connected) == 1, seconds=STARTS)
                await site.until(lambda: min(site.copies()) == 2, seconds=STARTS)
                assert hosts_of(cluster)[0] != workers[0]
                start = states()
                state, route = await site.walk(start, least=12)
                assert state.tobytes() == (await replayed(start, route)).tobytes()
            await site.until(lambda: len(site.connected) == 0, seconds=STARTS)

    asyncio.run(main())
