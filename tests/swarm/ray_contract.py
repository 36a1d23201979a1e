"""Run the contract of `engines.py` over Ray: `python ray_contract.py OUT`, tests in PYTHONPATH.

A separate program, because Ray reads its environment once per process, and leaves threads and
handlers in it. Writes one line of JSON per check to OUT: its name, seconds, measurements, and the
traceback if it failed.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from engines import BLOCKS, CHECKS, DEPTH, LIMITS, PLAN, Rig, rig_of

from layershuffle.swarm.chaos import FaultInjector
from layershuffle.swarm.coordinator import Coordinator
from layershuffle.swarm.placement import HostBackend
from layershuffle.swarm.ray_hosts import RayHosts
from layershuffle.swarm.ray_local import processes_of
from layershuffle.swarm.ray_session import local_ray
from layershuffle.swarm.router import Router
from waiting import HANGS, until

CHECK_SECONDS = 120.0
END_SECONDS = HANGS
RAY_ALONE = " over Ray alone"
VISITS, AT_ONCE = 3000, 10
# As Ray itself asks at a head: with whatever token the environment names.
CLIENT = """
import sys
from ray._raylet import GcsClient
try:
    print("in", GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, 3))
except Exception as error:
    print(type(error).__name__)
"""


async def nothing_listens_beyond_this_machine(rig: Rig) -> None:
    """Every port of every process of the cluster is on 127.0.0.1."""
    members = set(members_of_cluster())
    assert len(members) == 4 + len(BLOCKS)  # GCS, raylet, its two agents
    seen = {address for pid in members | {os.getpid()} for address, _ in listening(pid)}
    assert seen == {"127.0.0.1"}


async def no_port_answers_without_the_token(rig: Rig) -> None:
    """Those that speak HTTP refuse; those that speak gRPC close."""
    members = [*members_of_cluster(), os.getpid()]
    ports = {port for pid in members for _, port in listening(pid)}
    assert len(ports) >= 4 + len(BLOCKS)  # GCS, two of the raylet, an agent, this process
    statuses = {port: await asyncio.to_thread(status_at, port) for port in ports}
    assert set(statuses.values()) == {None, 401}, statuses


def status_at(port: int) -> int | None:
    """The status of the answer to `GET /`; `None` if there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANGS)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


async def memory_holds(rig: Rig) -> None:
    """Of every process of the swarm, over a few thousand visits."""
    await many_visits(rig, 500)
    before = resident()
    await many_visits(rig, VISITS)
    grown = {pid: size - before[pid] for pid, size in resident().items() if pid in before}
    gcs = {pid for pid in grown if "gcs_server" in Path(f"/proc/{pid}/cmdline").read_text()}
    rig.measured |= {"all_kb": sum(grown.values()), "gcs_kb": sum(map(grown.get, gcs))}
    assert len(gcs) == 1
    # A tenth of a kilobyte per visit: with Ray's task events it takes ten times that.
    assert rig.measured["gcs_kb"] < VISITS
    assert rig.measured["all_kb"] < 10 * VISITS


async def many_visits(rig: Rig, count: int) -> None:
    for _ in range(0, count, AT_ONCE):
        await asyncio.gather(*[rig.visit("a", BLOCKS["a"][0]) for _ in range(AT_ONCE)])


def members_of_cluster() -> list[int]:
    return list(processes_of(Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent))


def resident() -> dict[int, int]:
    """Kilobytes of memory of every process of the swarm, this one among them."""
    sizes = {}
    for pid in [*members_of_cluster(), os.getpid()]:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # it has ended
            continue
        sizes[pid] = int(status.partition("VmRSS:")[2].split()[0])
    return sizes


async def a_client_without_the_token_gets_nothing(rig: Rig) -> None:
    address = rig.ray.get_runtime_context().gcs_address
    wrong = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).with_name("wrong")
    wrong.write_text("0" * 64)
    for environment, answer in (
        ({"RAY_AUTH_MODE": "disabled"}, "AuthenticationError"),
        ({"RAY_AUTH_TOKEN_PATH": str(wrong)}, "AuthenticationError"),
        ({}, "in"),
    ):
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", CLIENT, address],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=2 * HANGS,
            check=False,
        )
        assert done.stdout.split()[:1] == [answer], done.stdout + done.stderr


async def hosts_outlive_their_coordinator(rig: Rig) -> None:
    """A gateway that starts again finds the processes and their blocks; it watches by itself."""
    before = await pids(rig.faults.backend)
    backend = RayHosts(rig.ray, limits=LIMITS)
    router = Router(backend.transport, depth=DEPTH, limits=LIMITS)
    second = Coordinator(PLAN, router=router, backend=backend, bundle=rig.bundle)
    watch = asyncio.create_task(second.run())
    try:
        begun = time.monotonic()
        assert await second.ready(within=HANGS) == ()
        rig.measured["adopted_s"] = time.monotonic() - begun
        assert await pids(backend) == before
        # Nobody visits: the watch finds a dead process, and starts another.
        await FaultInjector(second, ray=rig.ray).kill("b")
        rig.measured["noticed_s"] = await until(lambda: router.swarm["b"].condition == "gone")
        rig.measured["replaced_s"] = await until(lambda: router.swarm["b"].usable)
        assert (await pids(backend))["b"] != before["b"]
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await left_behind(second, backend)


async def left_behind(coordinator: Coordinator, backend: RayHosts) -> None:
    """Leave the hosts running, as a killed gateway does."""
    await coordinator.health.close()
    backend.forget()


async def a_frozen_process_is_ended_for_good(rig: Rig) -> None:
    """A stopped process cannot end on request."""
    pid = (await pids(rig.faults.backend))["a"]
    await rig.inject("freeze")
    rig.measured["readmitted_s"] = await rig.begin_anew("a")
    assert (await pids(rig.faults.backend))["a"] != pid
    await until(lambda: not Path(f"/proc/{pid}").exists())


async def visits_go_over_channels(rig: Rig) -> None:
    """Also to hosts that died, came back, were frozen and cut off."""
    kinds = {name: carrier.kind for name, carrier in rig.faults.backend.carriers().items()}
    assert kinds == dict.fromkeys(BLOCKS, "channel")


async def pids(backend: HostBackend) -> dict[str, int]:
    """Process numbers of the hosts."""
    return {name: (await backend.call(name, "info")).pid for name in BLOCKS}


RAY_CHECKS = {
    check.__name__: check
    for check in (
        nothing_listens_beyond_this_machine,
        no_port_answers_without_the_token,
        memory_holds,
        a_client_without_the_token_gets_nothing,
        a_frozen_process_is_ended_for_good,
        visits_go_over_channels,
        hosts_outlive_their_coordinator,  # the last one: the next engine takes over what it left
    )
}


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports on which a process listens for TCP."""
    try:
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()
    mine = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return {readable(row[1]) for row in rows if row[3] == "0A" and row[9] in mine}


def readable(address: str) -> tuple[str, int]:
    """Address and port of an entry of /proc/net/tcp as people write them."""
    raw, _, port = address.partition(":")
    words = [bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8)]
    ip = ipaddress.ip_address(b"".join(words))
    return str(getattr(ip, "ipv4_mapped", None) or ip), int(port, 16)


async def run_all(ray: Any, out: Path, *, channel: bool) -> None:
    """The checks with visits over data channels, or over Ray alone; names of these end in it.

    Who comes second finds the hosts of the first: every process imports torch for two seconds.
    """
    ending, checks = ("", {**CHECKS, **RAY_CHECKS}) if channel else (RAY_ALONE, CHECKS)
    hosts = RayHosts(ray, limits=LIMITS, channel=channel)
    rig = await rig_of(hosts, ray=ray)
    for name, check in checks.items():
        begun, rig.measured = time.monotonic(), {}
        task = asyncio.create_task(checked(rig, check))
        await asyncio.wait({task})
        error = task.exception()
        failure = "".join(traceback.format_exception(error)) if error else ""
        seconds = time.monotonic() - begun
        tell(out, name + ending, seconds=seconds, measured=rig.measured, failure=failure)
    if channel:
        await left_behind(rig.coordinator, hosts)
    else:
        await rig.coordinator.close()


async def checked(rig: Rig, check: Any) -> None:
    async with asyncio.timeout(CHECK_SECONDS):
        await rig.heal()
        await check(rig)


def tell(out: Path, name: str, **facts: Any) -> None:
    with out.open("a") as file:
        file.write(json.dumps({"name": name, **facts}) + "\n")


def main(out: Path) -> None:
    begun = time.monotonic()
    with local_ray(list(BLOCKS)) as session:
        directory = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent
        tell(out, "up", seconds=time.monotonic() - begun)
        for channel in (True, False):
            asyncio.run(run_all(session.ray, out, channel=channel))
        begun = time.monotonic()
    while [*processes_of(directory)] and time.monotonic() < begun + END_SECONDS:
        time.sleep(0.1)
    tell(out, "down", seconds=time.monotonic() - begun, left=len([*processes_of(directory)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
