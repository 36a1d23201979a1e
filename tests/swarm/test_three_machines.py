"""The commands of docs/pis.md, on three network namespaces of this machine, on a bridge.

Every host has its own network, process table, mounts and name; links can be cut and hosts killed
whole. Needs root and iproute2. Nothing outside the namespaces is touched, and all of it goes with
`close`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from exported import HOSTED
from once import once
from waiting import HANGS, STARTS, wait_for

# What a host does first, as process 1 of its own; then it runs its words.
_BOOT = r"""
set -e
hostname "$LS_NAME"
mount --make-rprivate /
mount -t tmpfs tmpfs /dev/shm
mkdir -p "$LS_PRIVATE" "$LS_PRIVATE-$LS_NAME"
mount --bind "$LS_PRIVATE-$LS_NAME" "$LS_PRIVATE"
mount --bind "$LS_HOSTS" /etc/hosts
exec "$@"
"""


def unavailable():
    """The reason why such hosts are impossible here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [
        tool for tool in ("ip", "unshare", "mount", "hostname") if shutil.which(tool) is None
    ]
    if missing:
        return f"{missing[0]} is missing (iproute2, util-linux)"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "this machine makes no namespaces"


class Network:
    """Hosts "h0", "h1" ... with the addresses 10.90.0.1, .2 ... on one bridge.

    `directory`: for what they write; its directory "own" is another one for each.
    """

    def __init__(self, directory, hosts):
        self.directory, self.tag = directory, f"ls{os.getpid()}"
        self.names = [f"h{number}" for number in range(hosts)]
        self.processes = {}
        lines = ["127.0.0.1 localhost", *(f"{self.ip(name)} {name}" for name in self.names)]
        (directory / "hosts").write_text("\n".join(lines) + "\n")

    def ip(self, name):
        return f"10.90.0.{int(name[1:]) + 1}"

    def __enter__(self):
        try:
            self._ip("netns", "add", f"{self.tag}-br")
            self._ip("-n", f"{self.tag}-br", "link", "add", "br0", "type", "bridge")
            self._ip("-n", f"{self.tag}-br", "link", "set", "br0", "up")
            for name in self.names:
                self._join(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def _join(self, name):
        bridge, own = f"{self.tag}-br", f"{self.tag}-{name}"
        self._ip("netns", "add", own)
        self._ip(
            *("link", "add", "eth0", "netns", own, "type", "veth"),
            *("peer", "name", name, "netns", bridge),
        )
        self._ip("-n", bridge, "link", "set", name, "master", "br0", "up")
        self._ip("-n", own, "addr", "add", f"{self.ip(name)}/24", "dev", "eth0")
        self._ip("-n", own, "link", "set", "eth0", "up")
        self._ip("-n", own, "link", "set", "lo", "up")

    def run(self, name, words, *, environment):
        """Run `words` on the host; its output goes to a file."""
        boot = {
            "LS_NAME": name,
            "LS_PRIVATE": str(self.directory / "own"),
            "LS_HOSTS": str(self.directory / "hosts"),
        }
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--mount-proc"]
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [
                    *("ip", "netns", "exec", f"{self.tag}-{name}"),
                    *(*apart, "bash", "-c", _BOOT, "boot", *words),
                ],
                env={**os.environ, **environment, **boot},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def cut(self, name):
        """Disconnect the host."""
        self._ip("-n", f"{self.tag}-br", "link", "set", name, "down")

    def mend(self, name):
        """Connect the host again."""
        self._ip("-n", f"{self.tag}-br", "link", "set", name, "up")

    def worsen(self, name):
        """Delay what the host sends by 200 ms, and lose a fifth of it; whether the kernel can."""
        words = ["tc", "-n", f"{self.tag}-{name}", "qdisc", "add", "dev", "eth0", "root", "netem"]
        bad = ["delay", "200ms", "loss", "20%"]
        return subprocess.run([*words, *bad], capture_output=True, check=False).returncode == 0

    def kill(self, name):
        """All of the host's processes die at once: its process 1 takes the others along."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=HANGS)

    def close(self):
        """Kill all processes, and delete the namespaces."""
        for name in [*self.processes]:
            self.kill(name)
        for name in [*self.names, "br"]:
            subprocess.run(
                ["ip", "netns", "delete", f"{self.tag}-{name}"], capture_output=True, check=False
            )

    @staticmethod
    def _ip(*words):
        return subprocess.run(
            ["ip", *words], capture_output=True, text=True, check=True, timeout=HANGS
        )


pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "available"),
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
    with Network(place, hosts=3) as network:
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
        patient = ["--deadline-ms 30000 --min-blocks 10 --json"]
        return json.loads(self.asked("layershuffle classify", *patient))

    def refused(self):
        wrong = self.place / "h2/wrong"
        wrong.touch(mode=0o600)
        wrong.write_text("another-key-of-some-length")
        done = self.elsewhere("layershuffle classify", key="wrong")
        return done.returncode, done.stderr


def test_all_machines_serve(story):
    assert story.status.count("healthy") == 2
    assert sorted(story.whole["blocks"]) == [*HOSTED]
    assert not story.whole["degraded"]
    assert {hop["host"] for hop in story.whole["route"]} == {"h1", "h2"}
    assert story.page.startswith("bundled:digit-pair.png: 42 ")


def test_a_client_without_the_key_gets_nothing(story):
    code, text = story.no_key
    assert code == 1
    assert "key" in text


def test_a_machine_is_cut_off_or_dies_and_another_takes_over_its_blocks(story):
    for answer in (story.cut, story.half):
        assert sorted(answer["blocks"]) == [*HOSTED]
        assert {h["host"] for h in answer["route"] if h["outcome"] == "answered"} == {"h2"}
        assert answer["top"][0]["label"] == story.whole["top"][0]["label"]
    assert story.after.count("healthy") == 1
    assert story.log[0] == "Host h1 has joined"
    assert story.log[-1].startswith("Host h1 has gone: ")


def test_a_link_that_loses_a_fifth_of_its_packets_loses_no_block(story):
    if not story.lossy:
        pytest.skip("this kernel has no netem")
    assert [len(answer["blocks"]) for answer in story.lossy] == [10] * 5


def test_the_page_is_short():
    assert len(PAGE.read_text(encoding="utf-8").split()) <= 600


def test_the_operator_commands_on_the_gateways_machine(story):
    assert "h2" in story.drained
