"""Hosts on the nodes of a Ray cluster (`swarm up --ray auto|ADDRESS`).

Ray starts one on every node that is there, and again where it ends: that is all. They dial in to
the gateway as any other host, and no visit passes through Ray. The nodes need layershuffle-host.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from layershuffle.ground.ray_cluster import connected_ray

_LOOK = 2.0  # seconds between looks at which nodes are there
_ID_LENGTH = 8
_log = logging.getLogger(__name__)


async def hosts_on_ray(address: str, *, url: str, token: str, memory: int) -> None:
    """Keep a host on every node of the cluster at `address`, until cancelled; then end them.

    `url`: of the gateway, as the nodes reach it; `memory`: bytes of weights that each takes. Raises
    `UsageError` if no cluster answers.
    """
    ray = await asyncio.to_thread(connected_ray, address)
    # It takes no processor from the cluster's own work, and Ray may start it as often as it ends.
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_host_class())
    actors: dict[str, Any] = {}
    silent = False
    try:
        while True:
            try:
                known = await asyncio.to_thread(ray.nodes)
            # Whatever Ray raises while its head starts again: the hosts that are there serve on.
            except Exception as error:  # noqa: BLE001
                if not silent:
                    _log.warning("Ray does not say which nodes are there: %s", error)
                silent = True
                await asyncio.sleep(_LOOK)
                continue
            silent = False
            nodes = {node["NodeID"] for node in known if node["Alive"]}
            for node in sorted(nodes - actors.keys()):
                there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    node, soft=False
                )
                name = f"ray-{node[:_ID_LENGTH]}"
                actors[node] = actor.options(scheduling_strategy=there).remote()
                actors[node].serve.remote(url, token, name, memory)
                _log.info("Host %s starts", name)
            # A node that comes back has another id.
            actors = {node: actors[node] for node in sorted(nodes)}
            await asyncio.sleep(_LOOK)
    finally:
        for handle in actors.values():
            ray.kill(handle)
        ray.shutdown()


def _host_class() -> type:
    # Defined here, so that Ray sends its code: the nodes need no layershuffle, and no torch.
    class RayHost:
        def serve(self, url: str, token: str, name: str, memory: int) -> None:
            import asyncio

            from layershuffle_host.host import Host

            asyncio.run(Host([url], token=token, name=name, memory=memory).run())

    return RayHost
