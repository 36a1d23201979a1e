"""A real swarm of processes: up, asked, under load while its hosts die, killed, and ended."""

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

from exported import HOSTED
from layershuffle import cli
from layershuffle.core.orders import ExecutionOrder
from layershuffle.gateway.client.client import AsyncSwarmClient, SwarmClient, SwarmError
from layershuffle.gateway.client.judging import asking, judged, sent
from layershuffle.gateway.client.labelled import labelled_images
from layershuffle.gateway.http.operator import find_operator, published
from layershuffle.ground.bundled import asset
from layershuffle.models import load
from waiting import HANGS, wait_for, wait_for_address

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def layershuffle(*words):
    """Run a client's command in this process, because a new one would import for seconds."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(list(words))
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def session_processes(leader):
    """Every process of the session that `leader` leads."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == leader and fields[0] != "Z":
                processes.append(int(entry.name))
    return processes


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    """`layershuffle swarm up` with three hosts: its supervisor, address and state directory.

    The supervisor restarts the program after failures, as a service manager does.
    """
    place = tmp_path_factory.mktemp("up")
    log = (place / "log").open("w+")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = ["swarm", "up", "--hosts", "3", "--port", port, "--state", str(place / "s")]
    again = ("bash", "-c", 'until "$@"; do sleep 1; done', "supervisor")
    process = subprocess.Popen(
        [*again, sys.executable, "-m", "layershuffle", *words],
        stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    try:
        address = wait_for_address(place / "log", process)
        yield process, address, str(place / "s")
    finally:
        log.close()
        for pid in session_processes(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(HANGS)


def test_up_serves_and_prints_the_next_command(swarm):
    process, address, state = swarm
    text = (Path(state).parent / "log").read_text()
    steps = re.findall(r"^ *[\d.]+ s  (.+)$", text, re.MULTILINE)
    assert sorted(step.partition(" is up with ")[0] for step in steps) == [
        "host-1", "host-2", "host-3",
    ]  # fmt: skip
    image = "bundled:digit-pair.png"  # the one of the README: 42
    # Time enough for a host that a busy machine slows down: by default blocks would be left out.
    words = ["--address", address, "--deadline-ms", "30000", "--min-blocks", "10", "--json"]
    done = layershuffle("classify", image, *words)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert sorted(answer["blocks"]) == [*HOSTED]
    between = ExecutionOrder(tuple(answer["blocks"]), 12, answer["versions"])
    order = str(between.within_ends((1, 1)))
    words = ["predict", "bundled:digits-swarm", image, "--order", order, "--top", "100", "--json"]
    whole = json.loads(layershuffle(*words).stdout)["images"][0]["top"]
    best = answer["top"][0]
    assert best["label"] == whole[0]["label"]
    stored = json.loads((asset("digits-onnx") / "calibration.json").read_text())
    power = 1 / stored["sureness"]["temperatures"][9]
    total = sum(guess["probability"] ** power for guess in whole)
    assert best["probability"] == pytest.approx(whole[0]["probability"] ** power / total, abs=1e-4)
    assert answer["chance"] == best["probability"]
    assert answer["expected"]["kept"] == 10
    status = layershuffle("swarm", "status", "--address", address).stdout
    assert status.count("healthy") == 3
    # The supervisor, the gateway and its hosts: nothing else runs.
    assert len(session_processes(process.pid)) == 5


def healthy_hosts(address):
    return layershuffle("swarm", "status", "--address", address).stdout.count("healthy")


@pytest.mark.alone
def test_requests_are_answered_while_a_third_of_the_hosts_dies(swarm):
    """None fails or is late, and as many answers are right as the calibration lets expect."""
    _, address, state = swarm
    images = labelled_images(load("bundled:digits-onnx"), "digit-pairs", count=400)

    async def asked():
        async with AsyncSwarmClient(address, patience=0) as client:
            ask = asking(client, images, deadline_ms=30_000, patient=True)

            async def kill():
                await asyncio.to_thread(operator.command, "kill", host="host-3")

            return await sent(ask, 400, events={100: kill})

    with closing(find_operator(state)) as operator:
        replies = asyncio.run(asked())
        assert {reply.ended for reply in replies} <= {"answered", "degraded"}
        verdict = judged(replies)
        assert verdict.answers == 400
        assert verdict.low <= verdict.top1 <= verdict.high
        wait_for(lambda: healthy_hosts(address), holds=lambda count: count == 2)
        operator.command("readmit", host="host-3")
        wait_for(lambda: healthy_hosts(address), holds=lambda count: count == 3)


def test_a_service_manager_starts_a_killed_gateway_again(swarm):
    """It has the same address and state directory; the hosts of the killed one died with it."""
    process, address, state = swarm
    gateway = published(state)["process"]
    log = Path(state).parent / "log"
    before = {*session_processes(process.pid)} - {process.pid}
    os.kill(gateway, signal.SIGKILL)
    wait_for(lambda: log.read_text().count("answers at") == 2)
    with SwarmClient(address) as client:
        wait_for(
            lambda: [host.condition for host in client.swarm().hosts],
            holds=lambda now: now == ["healthy"] * 3,
        )
        answer = client.classify(asset("digit-pair.png"), deadline_ms=30_000, confidence="off")
    assert len(answer.blocks) == 10
    assert published(state)["process"] != gateway
    assert not before & {*session_processes(process.pid)}


def test_ctrl_c_leaves_no_process_behind(swarm):
    process, address, state = swarm
    os.kill(published(state)["process"], signal.SIGINT)
    assert process.wait(HANGS) == 0
    wait_for(lambda: session_processes(process.pid), holds=lambda left: not left)
    # What hosts of other machines know stays.
    assert {path.name for path in Path(state).iterdir()} <= {"lock", "host-token"}
    text = (Path(state).parent / "log").read_text()
    assert "Traceback" not in text
    assert text.endswith("The swarm has ended, with all its hosts.\n")
    assert layershuffle("swarm", "status", "--address", address).returncode == 1


def test_of_two_gateways_a_killed_one_loses_its_requests_in_flight_and_no_other(tmp_path):
    """Two hosts serve both. Clients of the other notice nothing, nor do those who name both."""
    token, clients = tmp_path / "token", 4
    token.touch(mode=0o600)
    token.write_text("a secret of this test")

    def program(stack, name, *words):
        log = stack.enter_context((tmp_path / name).open("w"))
        process = subprocess.Popen(
            [sys.executable, "-m", *words, "--token-file", str(token)],
            stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT},
        )  # fmt: skip
        stack.callback(process.wait, HANGS)
        stack.callback(process.kill)
        return process

    async def asked(dying, addresses):
        """Answers by who was asked, and errors; the first gateway dies after 100 answers."""
        image = asset("digit-pair.png")
        groups = {"dying": addresses[:1], "staying": addresses[1:], "both": addresses}
        blocks, errors = {name: [] for name in groups}, {name: [] for name in groups}
        before = dict.fromkeys(groups, 0)

        async def ask(name):
            patience = 60 if name == "both" else 0
            async with AsyncSwarmClient(*groups[name], patience=patience) as client:
                while dying.poll() is None or (
                    name != "dying" and len(blocks[name]) < before[name] + 40
                ):
                    try:
                        answer = await client.classify(image, deadline_ms=30_000, confidence="off")
                        blocks[name].append(len(answer.blocks))
                    except SwarmError as error:
                        errors[name].append(error)

        async def kill():
            while sum(map(len, blocks.values())) < 100:
                await asyncio.sleep(0.005)
            before.update({name: len(answers) for name, answers in blocks.items()})
            dying.kill()
            dying.wait(HANGS)

        await asyncio.gather(kill(), *(ask(name) for name in groups for _ in range(clients)))
        return blocks, errors

    with ExitStack() as stack:
        up = ("layershuffle", "swarm", "up", "--hosts", "0", "--port", "0")
        names = ["one", "two"]
        gateways = [program(stack, n, *up, "--state", str(tmp_path / f"s-{n}")) for n in names]
        addresses = [
            wait_for_address(tmp_path / name, process)
            for name, process in zip(names, gateways, strict=True)
        ]
        for name in ("h1", "h2"):
            ways = [address.replace("http", "ws", 1) for address in addresses]
            words = ("--name", name, "--cache", str(tmp_path / "cache"))
            program(stack, name, "layershuffle_host", *ways, *words)
        for address in addresses:
            with SwarmClient(address) as client:
                wait_for(
                    lambda client=client: [len(host.blocks) for host in client.swarm().hosts],
                    holds=lambda held: held == [10, 10],
                )
        blocks, errors = asyncio.run(asked(gateways[0], addresses))
    assert {kept for answers in blocks.values() for kept in answers} == {10}
    assert min(map(len, blocks.values())) >= 10
    assert len(errors["dying"]) <= clients
    assert (errors["staying"], errors["both"]) == ([], [])
