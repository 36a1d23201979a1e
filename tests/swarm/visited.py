"""A gateway whose every address is visited once, in a process that has seen nothing else.

`python tests/swarm/visited.py` prints as JSON the status of each visit, and the modules of models
that the process has imported by then, of which there must be none.
"""

import asyncio
import json
import sys

import httpx

from layershuffle.gateway.hosts.served_model import ServedModel
from layershuffle.gateway.hosts.service import running_service
from layershuffle.gateway.http.app import create_app
from layershuffle.gateway.http.files import join_routes, runtime
from layershuffle.gateway.http.listening import listening
from layershuffle.gateway.http.operator import add_operator
from layershuffle.gateway.http.requests import Gateway
from layershuffle.gateway.http.start import local_hosts
from layershuffle.ground.bundled import asset

KEY = "an-operators-key-of-this-test"
HEAVY = {"torch", "torchvision", "timm", "transformers", "layershuffle.page"}


async def visits() -> dict[str, int]:
    """The status of the answer to each visit."""
    model = ServedModel(asset("digits-onnx"))
    async with (
        running_service(model, token="a token", copies=1) as (coordinator, remote_model),
        local_hosts(coordinator, 1),
    ):
        lacking = await coordinator.ready(1, within=120)
        assert lacking == []
        gateway = Gateway(remote_model, coordinator, model="bundled:digits-onnx")
        app = create_app(gateway, page=True)
        app.router.routes += join_routes(runtime())
        add_operator(app, key=KEY)
        async with (
            listening(app) as (listener, _),
            httpx.AsyncClient(base_url=listener.url, timeout=60) as client,
        ):
            statuses: dict[str, int] = {}
            addresses = ["/", "/page/facts", "/join", "/openapi.json"]
            addresses += ["/v1/swarm", "/metrics", "/livez", "/readyz", "/healthz"]
            for room in ("page", "swarm"):
                addresses += [f"/page/{path.name}" for path in asset(room).iterdir()]
            for address in addresses:
                statuses[address] = (await client.get(address)).status_code
            for name, body in (
                ("image", asset("digit-pair.png").read_bytes()),
                ("no image", b"no image"),
            ):
                answer = await client.post("/v1/classify", content=body)
                statuses[name] = answer.status_code
            for name in ("drain", "readmit", "kill"):
                answer = await client.post(
                    f"/operator/{name}",
                    json={"host": "host-1"},
                    headers={"Authorization": f"Bearer {KEY}"},
                )
                statuses[name] = answer.status_code
            return statuses


if __name__ == "__main__":
    statuses = asyncio.run(visits())
    print(json.dumps({"statuses": statuses, "imported": sorted(HEAVY & set(sys.modules))}))
