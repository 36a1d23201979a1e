"""The walk through three machines of docs/swarm.md, on three network namespaces, over TLS."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import netns
import pytest

from layershuffle.bundled import asset
from once import once
from waiting import STARTS, wait_for

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(netns.unavailable()), reason=netns.unavailable() or "available"),
]
GATEWAY, KEY = "https://10.90.0.1:8000", "a-key-of-some-length"


@pytest.fixture(scope="session")
def story(tmp_path_factory):
    """What the commands said, once for all pytest workers."""
    place = once(tmp_path_factory, "machines", tell)
    return SimpleNamespace(**json.loads((place / "said.json").read_text()))


def tell(place):
    place.mkdir()
    with netns.Network(place, hosts=3) as network:
        network.certify()
        answers = Machines(network, place).play()
    (place / "said.json").write_text(json.dumps(answers))


class Machines:
    """h0 is the gateway; pi-1 and pi-2 on h1 and h2 hold blocks; clients ask from h2."""

    def __init__(self, network, place):
        self.network, self.place = network, place
        self.environment = {
            "LAYERSHUFFLE_API_KEY": KEY, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip

    def play(self):
        (self.place / "state").mkdir(mode=0o700)
        for name, content in (("keys", KEY), ("token", "what hosts know")):
            (self.place / name).touch(mode=0o600)
            (self.place / name).write_text(f"{content}\n")
        self.come_up()
        answers = {"status": self.asked("swarm", "status"), "whole": self.classified()}
        answers["no_key"] = self.refused()
        self.network.cut("h1")
        self.until(self.healthy, lambda healthy: healthy == {"pi-2"})
        answers["cut"] = self.until(self.classified, lambda answer: not answer["degraded"])
        self.network.mend("h1")
        self.until(self.healthy, lambda healthy: healthy == {"pi-1", "pi-2"})
        self.network.kill("h1")
        answers["half"] = self.until(self.classified, lambda answer: not answer["degraded"])
        answers["after"] = self.asked("swarm", "status")
        state = ["--state", str(self.place / "state")]
        inside = ("ip", "netns", "exec", f"{self.network.tag}-h0")
        drained = self.run(*inside, *LAYERSHUFFLE, "swarm", "drain", "pi-2", *state)
        answers["drained"] = drained.stdout + drained.stderr
        return answers

    def come_up(self):
        up = [
            *(*LAYERSHUFFLE, "swarm", "up", "--hosts", "0", "--listen", "10.90.0.1"),
            *("--token-file", f"{self.place}/token", "--keys", f"{self.place}/keys"),
            *("--https-certificate", f"{self.place}/cert.pem"),
            *("--https-key", f"{self.place}/key.pem", "--state", f"{self.place}/state"),
        ]
        self.network.run("h0", up, environment=self.environment)
        for number in (1, 2):
            host = [
                *(sys.executable, "-m", "layershuffle_host", GATEWAY.replace("http", "ws", 1)),
                *("--token-file", f"{self.place}/token", "--name", f"pi-{number}"),
                *("--ca", f"{self.place}/ca.pem", "--cache", f"{self.place}/own/files"),
            ]
            self.network.run(f"h{number}", host, environment=self.environment, supervised=True)
        self.until(self.healthy, lambda healthy: healthy == {"pi-1", "pi-2"})

    def healthy(self):
        """The hosts that serve blocks."""
        done = self.elsewhere("swarm", "status", "--json")
        if done.returncode:  # the gateway is not up yet
            return set()
        hosts = json.loads(done.stdout)["hosts"]
        return {h["name"] for h in hosts if h["condition"] == "healthy" and h["blocks"]}

    def until(self, ask, true):
        def trace(answer):
            names = self.network.processes
            logs = [f"{n}: {(self.place / f'{n}.log').read_text()[-3000:]}" for n in names]
            return "\n".join([str(answer), *logs])

        return wait_for(ask, holds=true, trace=trace)

    def run(self, *words, **environment):
        return subprocess.run(
            words, capture_output=True, text=True, timeout=STARTS, check=False,
            env={**os.environ, **self.environment, **environment},
        )  # fmt: skip

    def elsewhere(self, *words, **environment):
        """A client on the third machine."""
        network = ("ip", "netns", "exec", f"{self.network.tag}-h2")
        server = ("--address", GATEWAY, "--authority", f"{self.place}/ca.pem")
        return self.run(*network, *LAYERSHUFFLE, *words, *server, **environment)

    def asked(self, *words):
        done = self.elsewhere(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def classified(self):
        patient = ["--deadline-ms", "30000", "--min-blocks", "12"]
        return json.loads(self.asked("classify", str(PICTURE), *patient, "--json"))

    def refused(self):
        done = self.elsewhere("classify", str(PICTURE), LAYERSHUFFLE_API_KEY="wrong")
        return done.returncode, done.stderr


LAYERSHUFFLE = (sys.executable, "-m", "layershuffle")
PICTURE = Path(asset("digit-pair.png"))


def test_all_machines_serve(story):
    assert story.status.count("healthy") == 2
    assert sorted(story.whole["blocks"]) == list(range(12))
    assert not story.whole["degraded"]
    assert {hop["host"] for hop in story.whole["route"]} == {"pi-1", "pi-2"}


def test_a_client_without_the_key_gets_nothing(story):
    code, text = story.no_key
    assert code == 1
    assert "key" in text


def test_a_machine_is_cut_off_or_dies_and_another_takes_over_its_blocks(story):
    for answer in (story.cut, story.half):
        assert sorted(answer["blocks"]) == list(range(12))
        assert {h["host"] for h in answer["route"] if h["outcome"] == "answered"} == {"pi-2"}
        assert answer["top"][0]["label"] == story.whole["top"][0]["label"]
    assert story.after.count("healthy") == 1


def test_the_operator_commands_on_the_gateways_machine(story):
    assert "pi-2" in story.drained
