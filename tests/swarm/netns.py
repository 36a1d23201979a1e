"""Separate hosts on one machine: network namespaces on a bridge.

Every host has its own network, process table, mounts and name; links can be cut and hosts killed
whole. Needs root and iproute2. Nothing outside the namespaces is touched, and all of it goes with
`close`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from waiting import HANGS

# What a host does first, as process 1 of its own; then it runs its words, again if they ask so.
_BOOT = r"""
set -e
hostname "$LS_NAME"
mount --make-rprivate /
mount -t tmpfs tmpfs /dev/shm
mkdir -p "$LS_PRIVATE" "$LS_PRIVATE-$LS_NAME"
mount --bind "$LS_PRIVATE-$LS_NAME" "$LS_PRIVATE"
mount --bind "$LS_HOSTS" /etc/hosts
set +e
"$@"
while [ "$LS_SUPERVISED" = 1 ]; do sleep 1; "$@"; done
exit $?
"""


def unavailable() -> str:
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

    def __init__(self, directory: Path, hosts: int) -> None:
        self.directory, self.tag = directory, f"ls{os.getpid()}"
        self.names = [f"h{number}" for number in range(hosts)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        lines = ["127.0.0.1 localhost", *(f"{self.ip(name)} {name}" for name in self.names)]
        (directory / "hosts").write_text("\n".join(lines) + "\n")

    def ip(self, name: str) -> str:
        return f"10.90.0.{int(name[1:]) + 1}"

    def __enter__(self) -> Network:
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self, name: str) -> None:
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

    def run(
        self,
        name: str,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        supervised: bool = False,
    ) -> None:
        """Run `words` on the host, again and again if `supervised`; its output goes to a file."""
        boot = {
            "LS_NAME": name,
            "LS_PRIVATE": str(self.directory / "own"),
            "LS_HOSTS": str(self.directory / "hosts"),
            "LS_SUPERVISED": "1" if supervised else "0",
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

    def cut(self, name: str) -> None:
        """Disconnect the host."""
        self._ip("-n", f"{self.tag}-br", "link", "set", name, "down")

    def mend(self, name: str) -> None:
        """Connect the host again."""
        self._ip("-n", f"{self.tag}-br", "link", "set", name, "up")

    def worsen(self, name: str) -> bool:
        """Delay what the host sends by 200 ms, and lose a fifth of it; whether the kernel can."""
        words = ["tc", "-n", f"{self.tag}-{name}", "qdisc", "add", "dev", "eth0", "root", "netem"]
        bad = ["delay", "200ms", "loss", "20%"]
        return subprocess.run([*words, *bad], capture_output=True, check=False).returncode == 0

    def kill(self, name: str) -> None:
        """All of the host's processes die at once: its process 1 takes the others along."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=HANGS)

    def close(self) -> None:
        """Kill all processes, and delete the namespaces."""
        for name in [*self.processes]:
            self.kill(name)
        for name in [*self.names, "br"]:
            subprocess.run(
                ["ip", "netns", "delete", f"{self.tag}-{name}"], capture_output=True, check=False
            )

    @staticmethod
    def _ip(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ip", *words], capture_output=True, text=True, check=True, timeout=HANGS
        )
