"""The walk through three machines of docs/swarm.md, word for word, on three network namespaces.

Beyond the walk, the head's Ray dies under the gateway and is started again.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import netns
import pytest

from layershuffle.models import load
from layershuffle.swarm.load_client import labelled_images
from layershuffle.swarm.plan import DEFAULT_MODEL, HostPlan, SwarmPlan, plan_text
from once import once
from waiting import STARTS, wait_for

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(netns.unavailable()), reason=netns.unavailable() or "available"),
]
HEAD, GATEWAY = "10.90.0.1:6400", "http://10.90.0.1:8000"
BLOCKS = {"pi-1": tuple(range(0, 12, 2)), "pi-2": tuple(range(1, 12, 2))}
# What /healthz says, whatever its status.
HEALTH = f"""
import urllib.error, urllib.request
try:
    print(urllib.request.urlopen("{GATEWAY}/healthz").read().decode())
except urllib.error.HTTPError as error:
    print(error.read().decode())
"""
PROGRAM = (sys.executable, "-m", "layershuffle")
# On the head: the cluster's head, which starts again only when the test says so, and beside it the
# gateway as soon as that answers.
BOTH = """
(while :; do "${@:3:$2}"; until [ -e "$1/again" ]; do sleep 0.2; done; done) &
sleep 5; until "${@:$2+3}"; do sleep 1; done
"""


@pytest.fixture(scope="session")
def story(tmp_path_factory):
    """What the commands said, once for all pytest workers."""
    place = once(tmp_path_factory, "machines", tell)
    return SimpleNamespace(**json.loads((place / "said.json").read_text()))


def tell(final):
    # Sockets lie in it, and their paths are to be short.
    place = Path(tempfile.mkdtemp(prefix="ls-", dir="/tmp"))
    try:
        with netns.Network(place, hosts=3) as network:
            network.certify()
            answers = Machines(network, place).play()
        (place / "said.json").write_text(json.dumps(answers))
    finally:
        for scratch in place.glob("ray*"):
            shutil.rmtree(scratch)
        shutil.move(place, final)


class Machines:
    def __init__(self, network, place):
        self.network, self.place = network, place
        self.environment = {
            "TMPDIR": str(place / "ray"),  # another directory on every machine
            "LAYERSHUFFLE_API_KEY": "a-key-of-some-length",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.secure = ["--token", f"{place}/token"] + [
            word
            for flag, name in (("certificate", "cert"), ("key", "key"), ("authority", "ca"))
            for word in (f"--tls-{flag}", f"{place}/{name}.pem")
        ]

    def play(self):
        (self.place / "state").mkdir(mode=0o700)
        keys = self.place / "keys"
        keys.touch(mode=0o600)
        keys.write_text("a-key-of-some-length\n")
        hosts = {name: HostPlan(blocks=blocks) for name, blocks in BLOCKS.items()}
        (self.place / "plan.yaml").write_text(plan_text(SwarmPlan(hosts=hosts)))
        (image,) = labelled_images(load(DEFAULT_MODEL), "digit-pairs", count=1)
        (self.place / "digit.png").write_bytes(image.image)
        self.come_up()
        answers = {"label": image.label, "status": self.asked("swarm", "status")}
        answers["whole"] = self.classified()
        answers["no_key"] = self.refused()
        answers |= self.head_dies()
        self.network.kill("h1")
        answers["half"] = self.until(self.classified, lambda answer: answer["degraded"])
        answers["after"] = self.asked("swarm", "status")
        state = ["--state", str(self.place / "state")]
        answers["drained"] = self.run(*PROGRAM, "swarm", "drain", "pi-2", *state).stdout
        return answers

    def come_up(self):
        head = [
            *(*PROGRAM, "swarm", "head", "--ip", "10.90.0.1"),
            *("--store", f"{self.place}/store", *self.secure),
        ]
        deploy = [
            *(*PROGRAM, "swarm", "deploy", f"{self.place}/plan.yaml", "--address", HEAD),
            *("--bind", "10.90.0.1", "--keys", f"{self.place}/keys"),
            *("--state", f"{self.place}/state", *self.secure),
        ]
        words = ["bash", "-c", BOTH, "both", str(self.place), str(len(head)), *head, *deploy]
        self.network.run("h0", words, environment=self.environment)
        self.until(lambda: self.log("h0"), lambda log: "The head is at" in log)
        for number, name in enumerate(BLOCKS, 1):
            host = f"h{number}"
            words = [
                *(*PROGRAM, "swarm", "host", "--address", HEAD, "--name", name),
                *("--ip", self.network.ip(host), *self.secure),
            ]
            self.network.run(host, words, environment=self.environment, supervised=True)
        self.until(lambda: self.log("h0"), lambda log: "answers at http" in log)
        # A busy machine may take longer for its hosts than the gateway waits for them (--wait).
        self.until(self.health, lambda health: health["usable_hosts"] == len(BLOCKS))

    def head_dies(self):
        """Its GCS is killed, and with that all of Ray on the head's machine ends."""
        (gcs,) = self.processes("gcs_server")
        os.kill(gcs, signal.SIGKILL)
        self.until(lambda: self.processes("raylet"), lambda pids: not pids)
        away = self.until(self.health, lambda health: "head at" in (health["why"] or ""))
        answers = [self.classified() for _ in range(3)]
        still_away = self.health()
        (self.place / "again").touch()
        back = self.until(self.health, lambda health: not health["why"])
        (self.place / "again").unlink()
        return {
            "away": [away, still_away], "without_head": answers, "back": back,
            "with_head": self.classified(),
        }  # fmt: skip

    def processes(self, name):
        """Those of Ray's programs of that name on the head's machine."""
        titles = (Path(f"/proc/{pid}/comm") for pid in self.network.running("h0", ""))
        return [
            int(path.parent.name) for path in titles if path.exists() and name in path.read_text()
        ]

    def health(self):
        network = ("ip", "netns", "exec", f"{self.network.tag}-h2")
        return json.loads(self.run(*network, sys.executable, "-c", HEALTH).stdout)

    def log(self, name):
        return (self.place / f"{name}.log").read_text()

    def until(self, ask, true):
        def trace(answer):
            logs = [f"{name}: {self.log(name)[-3000:]}" for name in self.network.processes]
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
        return self.run(*network, *PROGRAM, *words, "--address", GATEWAY, **environment)

    def asked(self, *words):
        done = self.elsewhere(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def classified(self):
        return json.loads(self.asked("classify", f"{self.place}/digit.png", "--json"))

    def refused(self):
        done = self.elsewhere("classify", f"{self.place}/digit.png", LAYERSHUFFLE_API_KEY="wrong")
        return done.returncode, done.stderr


def test_all_machines_serve(story):
    assert story.status.count("healthy") == 2
    assert sorted(story.whole["blocks"]) == list(range(12))
    assert not story.whole["degraded"]
    assert story.whole["images"][0]["top"][0]["index"] == story.label
    assert {hop["host"] for hop in story.whole["route"]} == set(BLOCKS)


def test_a_client_without_the_key_gets_nothing(story):
    code, text = story.no_key
    assert code == 1
    assert "key" in text


def test_answers_go_on_while_the_head_is_away(story):
    """They are complete and from the same processes; the health reports the failure meanwhile."""
    for health in story.away:
        assert health["ok"]
        assert "The head at 10.90.0.1:6400 does not answer" in health["why"]
    for answer in [*story.without_head, story.with_head]:
        assert sorted(answer["blocks"]) == list(range(12))
        assert not answer["degraded"]
        assert answer["images"][0]["top"][0]["index"] == story.label
    assert story.back["ok"]


def test_a_machine_dies_and_answers_go_on(story):
    # Half of the blocks are left, and may run again in the time that there is.
    assert sorted(set(story.half["blocks"])) == list(BLOCKS["pi-2"])
    assert story.half["expected"]["kept"] == 6
    assert all("pi-1" in skip["why"] for skip in story.half["skipped"])
    assert story.after.count("healthy") == 1


def test_the_operator_commands_from_the_head(story):
    assert "pi-2" in story.drained
