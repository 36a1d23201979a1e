"""The commands of docs/pis.md, on three network namespaces."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import netns
import pytest

from once import once
from waiting import STARTS, wait_for

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(netns.unavailable()), reason=netns.unavailable() or "available"),
]
PAGE = Path(__file__).parent.parent.parent / "docs" / "pis.md"
HOST = "layershuffle-host"


@pytest.fixture(scope="session")
def story(tmp_path_factory):
    """What the commands said, once for all pytest workers."""
    place = once(tmp_path_factory, "machines", tell)
    return SimpleNamespace(**json.loads((place / "said.json").read_text()))


def tell(place):
    place.mkdir()
    with netns.Network(place, hosts=3) as network:
        answers = Machines(network, place).play()
    (place / "said.json").write_text(json.dumps(answers))


def block(begin):
    """The commands of the page from this line on, with addresses of the namespaces."""
    text = PAGE.read_text(encoding="utf-8").replace("10.0.0.1", "10.90.0.1")
    (found,) = re.findall(rf"^```\n({re.escape(begin)}.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return found


class Machines:
    """pi-0 is the gateway in h0; h1 and h2 hold blocks; clients ask from h2."""

    def __init__(self, network, place):
        self.network, self.place = network, place
        programs = place / "bin"
        programs.mkdir()
        for name in network.names:
            (place / name).mkdir(mode=0o700)
        for name, module in (("layershuffle", "layershuffle"), (HOST, "layershuffle_host")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            (programs / name).chmod(0o755)
        self.environment = {
            "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
            "PATH": f"{programs}:{os.environ['PATH']}",
        }  # fmt: skip

    def play(self):
        self.come_up()
        answers = {"status": self.asked("layershuffle swarm status"), "whole": self.classified()}
        answers["page"] = self.asked("layershuffle classify")
        answers["no_key"] = self.refused()
        self.network.cut("h1")
        self.until(self.healthy, lambda healthy: healthy == {"h2"})
        answers["cut"] = self.until(self.classified, lambda answer: not answer["degraded"])
        self.network.mend("h1")
        self.until(self.healthy, lambda healthy: healthy == {"h1", "h2"})
        lossy = self.network.worsen("h1")
        answers["lossy"] = [self.classified() for _ in range(5)] if lossy else []
        self.network.kill("h1")
        answers["half"] = self.until(self.classified, lambda answer: not answer["degraded"])
        # The last word is said, if ten seconds later.
        answers["log"] = self.until(self.lines, lambda lines: "has gone: " in lines[-1])
        answers["after"] = self.asked("layershuffle swarm status")
        drained = self.inside("h0", "layershuffle swarm drain h2")
        answers["drained"] = drained.stdout + drained.stderr
        return answers

    def come_up(self):
        self.start("h0", block("openssl req"))
        token = self.place / "h0/.local/state/layershuffle/swarm/host-token"
        self.until(token.exists, lambda there: there)
        for name in ("h1", "h2"):  # as scp does on the page
            for file in (token, self.place / "h0/cert.pem"):
                shutil.copy(file, self.place / name)
            self.start(name, block("layershuffle-host"))
        shutil.copy(self.place / "h0/keys", self.place / "h2")
        self.until(self.healthy, lambda healthy: healthy == {"h1", "h2"})

    def start(self, name, text):
        """Run commands on a machine, the last of which goes on."""
        environment = {**self.environment, "HOME": str(self.place / name)}
        words = ["bash", "-c", f"cd {self.place / name}\n{text}"]
        self.network.run(name, words, environment=environment)

    def healthy(self):
        """The hosts that serve blocks."""
        done = self.elsewhere("layershuffle swarm status", "--json")
        if done.returncode:  # the gateway is not up yet
            return set()
        hosts = json.loads(done.stdout)["hosts"]
        return {h["name"] for h in hosts if h["condition"] == "healthy" and h["blocks"]}

    def lines(self):
        """What the gateway has logged of h1."""
        log = (self.place / "h0.log").read_text()
        return re.findall(r"(?<=INFO |NING )Host h1 .*$", log, re.MULTILINE)

    def until(self, ask, true):
        def trace(answer):
            names = self.network.processes
            logs = [f"{n}: {(self.place / f'{n}.log').read_text()[-3000:]}" for n in names]
            return "\n".join([str(answer), *logs])

        return wait_for(ask, holds=true, trace=trace)

    def inside(self, name, text):
        """What commands on a machine said."""
        return subprocess.run(
            ["ip", "netns", "exec", f"{self.network.tag}-{name}", "bash", "-c", text],
            capture_output=True, text=True, timeout=STARTS, check=False, cwd=self.place / name,
            env={**os.environ, **self.environment, "HOME": str(self.place / name)},
        )  # fmt: skip

    def elsewhere(self, begin, *more, key="keys"):
        """A client's command of the page that begins so, on the third machine."""
        commands = block("layershuffle swarm status").replace("\\\n", "").splitlines()
        (command,) = [line for line in commands if line.startswith(begin)]
        return self.inside("h2", " ".join([command.replace("-file keys", f"-file {key}"), *more]))

    def asked(self, begin, *more):
        done = self.elsewhere(begin, *more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def classified(self):
        patient = ["--deadline-ms 30000 --min-blocks 12 --json"]
        return json.loads(self.asked("layershuffle classify", *patient))

    def refused(self):
        wrong = self.place / "h2/wrong"
        wrong.touch(mode=0o600)
        wrong.write_text("another-key-of-some-length")
        done = self.elsewhere("layershuffle classify", key="wrong")
        return done.returncode, done.stderr


def test_all_machines_serve(story):
    assert story.status.count("healthy") == 2
    assert sorted(story.whole["blocks"]) == list(range(12))
    assert not story.whole["degraded"]
    assert {hop["host"] for hop in story.whole["route"]} == {"h1", "h2"}
    assert story.page.startswith("bundled:digit-pair.png: 42 ")


def test_a_client_without_the_key_gets_nothing(story):
    code, text = story.no_key
    assert code == 1
    assert "key" in text


def test_a_machine_is_cut_off_or_dies_and_another_takes_over_its_blocks(story):
    for answer in (story.cut, story.half):
        assert sorted(answer["blocks"]) == list(range(12))
        assert {h["host"] for h in answer["route"] if h["outcome"] == "answered"} == {"h2"}
        assert answer["top"][0]["label"] == story.whole["top"][0]["label"]
    assert story.after.count("healthy") == 1
    assert story.log[0] == "Host h1 has joined"
    assert story.log[-1].startswith("Host h1 has gone: ")


def test_a_link_that_loses_a_fifth_of_its_packets_loses_no_block(story):
    if not story.lossy:
        pytest.skip("this kernel has no netem")
    assert [len(answer["blocks"]) for answer in story.lossy] == [12] * 5


def test_the_page_is_short():
    assert len(PAGE.read_text(encoding="utf-8").split()) <= 600


def test_the_operator_commands_on_the_gateways_machine(story):
    assert "h2" in story.drained
