"""A local cluster whose own processes are killed one after the other: `python ray_kills.py`.

A separate program, because Ray reads its environment once per process. Writes lines of JSON: its
process, parent and directory; what became of each process of Ray that was killed. Then it waits,
until it is killed itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from layershuffle.cli.swarm.local_faults import child_of
from layershuffle.swarm.ray_local import processes_of
from layershuffle.swarm.ray_session import RaySession, local_ray
from layershuffle.swarm.scenarios import PROCESSES
from waiting import until


def main() -> None:
    with local_ray(["a"]) as session:
        directory = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent
        tell(pid=os.getpid(), parent=os.getppid(), directory=str(directory))
        asyncio.run(kill_each(session, directory))
        time.sleep(600)


async def kill_each(session: RaySession, directory: Path) -> None:
    renewals: list[str] = []
    keeping = asyncio.create_task(session.keep(forget=lambda: None, begin_anew=renewals.append))
    for name in filter(None, PROCESSES.values()):
        await until(lambda: names_of(directory) == {*PROCESSES.values()} - {""})
        before, so_far = {*processes_of(directory)}, len(renewals)
        os.kill(child_of(os.getpid(), name), signal.SIGKILL)
        noticed = await until(lambda: bool(session.trouble))
        trouble = session.trouble
        whole = await until(lambda: not session.trouble)
        left = sorted(before & {*processes_of(directory)})
        nodes = [node["Alive"] for node in session.ray.nodes()]
        tell(
            name=name, noticed=noticed, whole=whole, trouble=trouble, before=len(before),
            left=len(left), renewals=len(renewals) - so_far, nodes=nodes,
        )  # fmt: skip
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


def names_of(directory: Path) -> set[str]:
    """Names of the cluster's processes, of which the kernel keeps 15 letters."""
    names = set()
    for pid in processes_of(directory):
        try:
            names.add(Path(f"/proc/{pid}/comm").read_text().strip())
        except OSError:  # it has ended
            continue
    return names


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
