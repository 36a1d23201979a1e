"""Real hosts: three network namespaces, with Ray, token and TLS, under failures.

All that happens, happens once, in the fixture; the tests read the head's log. h0 is the head, h1
and h2 hold blocks. The head is killed and started again, a cable pulled and mended, a host killed.
Each part of the story has five minutes at most, in case it hangs.
"""

import json
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import netns
import numpy as np
import pytest
from engines import pico, run_blocks

from layershuffle.swarm.bundle import make_bundle
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.plan import HostPlan, SwarmPlan
from layershuffle.swarm.ray_config import (
    HEAD_PORT,
    HOST_PORT,
    PORT_SPAN,
    Tls,
    channel_ports,
    environment,
    host_command,
    new_token,
)
from once import once
from waiting import HANGS

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(netns.unavailable()), reason=netns.unavailable() or "available"),
]

DEADLINE = 5.0  # a hop costs 0.6 s at most, and a busy machine as much again
PART_SECONDS = 300.0
HERE = Path(__file__).parent
BLOCKS = {"h1": (0, 2), "h2": (1, 3)}
LIMITS = Limits(
    deadline_ms=DEADLINE * 1000, hop_floor_ms=400, hop_cap_ms=600, start_ms=60_000, audit_share=0.0
)


@pytest.fixture(scope="session")
def story(tmp_path_factory):
    """Everything that the head wrote, once for all pytest workers."""
    place = once(tmp_path_factory, "netns", tell)
    marks = json.loads((place / "marks.json").read_text())
    return SimpleNamespace(directory=place, log=lines(place), **marks)


def tell(place):
    # Sockets lie in it, and their paths are to be short.
    directory = Path(tempfile.mkdtemp(prefix="ls-net-", dir="/tmp"))
    try:
        play(directory)
    finally:
        for scratch in directory.glob("ray*"):
            shutil.rmtree(scratch)
        shutil.move(directory, place)


def play(directory):
    """Play the story; writes the times of its events to "marks.json"."""
    marks = {"place": str(directory), "tag": f"ls{os.getpid()}"}
    bundle = make_bundle(pico())
    (directory / "bundle.pickle").write_bytes(pickle.dumps(bundle))
    hosts = {name: HostPlan(blocks=blocks) for name, blocks in BLOCKS.items()}
    plan = SwarmPlan(model="pico", hosts=hosts, limits=LIMITS)
    (directory / "plan.json").write_text(plan.model_dump_json())
    new_token(directory / "token")
    try:
        with netns.Network(directory, hosts=3) as network:
            network.certify()
            for part in (come_up, restart_the_head, pull_a_cable, kill_a_host, kill_an_agent):
                part(network, directory, marks)
    finally:
        (directory / "marks.json").write_text(json.dumps(marks))


def come_up(network, directory, marks):
    marks["begun"] = time.monotonic()
    start_head(network, directory)
    tls = Tls(directory / "cert.pem", directory / "key.pem", directory / "ca.pem")
    for name in BLOCKS:
        words = host_command(
            directory / "ray",
            address=f"{network.ip('h0')}:{HEAD_PORT}",
            name=name,
            ip=network.ip(name),
        )
        variables = environment(directory / "token", tls=tls, port=HOST_PORT)
        network.run(name, words, environment=variables, supervised=True)
    until(network, directory, lambda log: count(log, "request") >= 40)
    marks["ports"] = {name: sorted(network.listening(name)) for name in network.names}


def start_head(network, directory):
    before = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(HERE), str(HERE.parent), *([before] if before else [])])
    words = [sys.executable, str(HERE / "netns_head.py"), str(directory), network.ip("h0")]
    network.run("h0", words, environment={"PYTHONPATH": paths}, supervised=True)


def restart_the_head(network, directory, marks):
    marks["head_killed"] = time.monotonic()
    network.kill("h0")
    before = count(lines(directory), "request")
    start_head(network, directory)
    until(network, directory, lambda log: count(log, "request") >= before + 40)


def pull_a_cable(network, directory, marks):
    marks["cut"] = time.monotonic()
    network.cut("h1")
    until(network, directory, lambda log: any(condition(log, "h1", "gone", since=marks["cut"])))
    answer_some(network, directory)
    marks["mended"] = time.monotonic()
    network.mend("h1")
    until(
        network, directory, lambda log: any(condition(log, "h1", "healthy", since=marks["mended"]))
    )
    marks["back"] = time.monotonic()
    marks["actors"] = len(network.running("h1", "ray::BlockHost"))
    answer_some(network, directory)


def kill_a_host(network, directory, marks):
    marks["killed"] = time.monotonic()
    network.kill("h2")
    until(network, directory, lambda log: any(condition(log, "h2", "gone", since=marks["killed"])))
    answer_some(network, directory)
    marks["killed_ended"] = time.monotonic()


def kill_an_agent(network, directory, marks):
    """One of the two without which a raylet ends, with the exit code of one that was told to."""
    start = "\0".join([sys.executable, "-m", "ray.scripts.scripts", "start"])
    (member,) = network.running("h1", start)
    # The process has this title only once it has started.
    until(network, directory, lambda log: network.running("h1", "ray::DashboardAgent"))
    (agent,) = network.running("h1", "ray::DashboardAgent")
    os.kill(agent, signal.SIGKILL)
    # The machine joins again, or the story ends here.
    until(network, directory, lambda log: {*network.running("h1", start)} - {member})
    (directory / "stop").touch()
    until(network, directory, lambda log: count(log, "stopped") >= 1)


def lines(directory):
    path = directory / "log.jsonl"
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
    return [json.loads(line) for line in whole]


def until(network, directory, true):
    deadline = time.monotonic() + PART_SECONDS
    while not true(lines(directory)):
        ended = [name for name, process in network.processes.items() if process.poll() is not None]
        if time.monotonic() > deadline or ended:
            logs = "\n".join(
                f"--- {path.name}\n{path.read_text()[-3000:]}" for path in directory.glob("*.log")
            )
            raise TimeoutError(f"ended: {ended}\n{logs}\n{lines(directory)[-5:]}")
        time.sleep(0.1)


def answer_some(network, directory):
    """Wait until 20 requests that begin from now on are answered."""
    now = time.monotonic()
    until(network, directory, lambda log: sum(line.get("begun", 0) > now for line in log) >= 20)


def count(log, what):
    return sum(line["what"] == what for line in log)


def condition(log, host, wanted, since):
    """Times since `since` at which the host got into that condition."""
    for line in log:
        if line["what"] == "conditions" and line["t"] >= since and line.get(host) == wanted:
            yield line["t"]


def requests(story, since, until_):
    """Requests that ended between two times."""
    return [
        line
        for line in story.log
        if line["what"] == "request" and since <= line["t"] and line["begun"] <= until_
    ]


def check_answered(answered):
    assert answered
    late = [line["ms"] for line in answered if line["ms"] > DEADLINE * 1000]
    assert not late, late
    assert all(line["order"] for line in answered), "an answer without any block"


def first_failed_hop(story, host, since):
    """Seconds from `since` until the router gave up a hop on that host for the first time."""
    return next(
        line["t"] - since
        for line in story.log
        if line["what"] == "hop"
        and line["host"] == host
        and line["outcome"] != "answered"
        and line["t"] > since
    )


def test_answers_over_real_links_equal_the_model_bit_for_bit(story):
    paths = sorted(story.directory.glob("state-*.npy"))
    assert len(paths) >= 6
    model = pico()
    start = make_bundle(model).sample
    for path in paths:
        order = tuple(map(int, re.findall(r"\d+", path.stem.split("-", 2)[2])))
        assert sorted(order) == [0, 1, 2, 3]
        assert (np.load(path) == run_blocks(model, start, order)).all()


def test_states_went_over_data_channels(story):
    """With TLS, by certificates that name the machines' addresses."""
    for line in story.log:
        if line["what"] == "ready":
            assert line["carriers"] == {name: ["channel", ""] for name in BLOCKS}


def test_only_the_documented_ports_listen(story):
    head, host = ({first, first + 1, first + 2} for first in (HEAD_PORT, HOST_PORT))
    head |= {HEAD_PORT + 3, *range(HEAD_PORT + 11, HEAD_PORT + PORT_SPAN)}
    host |= {*channel_ports(environment(story.directory, port=HOST_PORT))}
    host |= set(range(HOST_PORT + 10, HOST_PORT + PORT_SPAN))
    for name, documented in (("h0", head), ("h1", host), ("h2", host)):
        ports = set(story.ports[name])
        assert len(ports) >= 4
        assert ports <= documented, (name, ports - documented)


def test_a_restarted_head_finds_its_hosts_as_they_were(story):
    """Machines joined again by themselves, and the hosts' processes are the same."""
    first, second = (line for line in story.log if line["what"] == "ready")
    assert first["missing"] == second["missing"] == []
    assert second["pids"] == first["pids"]
    print(f"head killed: answers again after {second['t'] - story.head_killed:.1f} s")


def test_a_pulled_cable_costs_a_hop_and_no_request(story):
    answered = requests(story, story.cut, story.mended)
    check_answered(answered)
    print(f"cable pulled: given up after {first_failed_hop(story, 'h1', story.cut):.2f} s", end="")
    gone = next(condition(story.log, "h1", "gone", since=story.cut)) - story.cut
    print(f", Ray knew after {gone:.1f} s, back {story.back - story.mended:.1f} s after the link")
    reasons = {line["skipped"].get("0") for line in answered}
    assert "host h1 is suspect: no answer in time" in reasons, reasons
    assert "host h1 is gone: its machine has left the swarm" in reasons
    assert any(line["skipped"].keys() == {"0", "2"} for line in answered)


def test_the_host_is_back_after_the_cable(story):
    answered = requests(story, story.back, story.killed)
    check_answered(answered)
    assert any(line["skipped"] == {} for line in answered)
    assert story.actors == 1, "its process from before the cut has ended"


def test_a_killed_host_costs_a_hop_and_no_request(story):
    answered = requests(story, story.killed, story.killed_ended)
    check_answered(answered)
    print(f"killed: given up after {first_failed_hop(story, 'h2', story.killed):.2f} s", end="")
    gone = next(condition(story.log, "h2", "gone", since=story.killed)) - story.killed
    print(f", Ray knew after {gone:.2f} s")
    assert first_failed_hop(story, "h2", story.killed) < DEADLINE
    assert gone < HANGS
    assert any(line["skipped"].keys() == {"1", "3"} for line in answered)


def test_the_head_ended_without_an_error(story):
    stopped = next(line for line in story.log if line["what"] == "stopped")
    assert stopped["errors"] == []
    assert not list(Path("/run/netns").glob(f"{story.tag}-*"))
    assert not netns.processes_with(story.place)
