"""Hosts of this machine as child processes, which die with the gateway.

Each is `python -m layershuffle_host`, as on any other machine. A process that ends is started
again, after a pause that doubles while it keeps ending.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import re
import signal
import sys
from collections.abc import Mapping

from layershuffle.gateway.brain.limits import Limits
from layershuffle.ground.errors import LayerShuffleError
from layershuffle.ground.text import one_line, printable

_PR_SET_PDEATHSIG = 1
_KEPT = 1000  # bytes of what a process said last
# A line of the log, of a host (date, time, level) or of ONNX Runtime.
_LOGGED = re.compile(r"\S+ \S+ (DEBUG|INFO|WARNING|ERROR) |.*\[[VIWE]:onnxruntime:")
_log = logging.getLogger(__name__)


class Children:
    """The hosts of this machine by name, once `run` has started them.

    `url`: where they dial in; `token`: what they have to know there; `memory`: bytes of weights
    that each takes.
    """

    def __init__(
        self,
        names: tuple[str, ...] = (),
        *,
        limits: Limits,
        url: str = "",
        token: str = "",
        memory: int = 0,
    ) -> None:
        self.names = names
        self._limits = limits
        self._token = token.encode()
        # From a pipe: a file may be gone when a host is started again in a month.
        self._words = (url, "--token-file", "/dev/stdin", "--memory", str(memory))
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._held: dict[str, asyncio.Event] = {}
        for name in names:
            self._held[name] = asyncio.Event()
            self._held[name].set()

    @property
    def pids(self) -> Mapping[str, int]:
        """The processes that run now, by the name of their host."""
        return {
            name: process.pid
            for name, process in self._processes.items()
            if process.returncode is None
        }

    async def run(self) -> None:
        """Start all hosts, and those that end again, until cancelled; then end them."""
        try:
            async with asyncio.TaskGroup() as group:
                for name in self.names:
                    group.create_task(self._keep(name))
        finally:
            for name in self.pids:
                self.signal(name, signal.SIGKILL)
            # Until then their pipes and watches hold on to the event loop.
            for process in self._processes.values():
                await process.communicate()

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process of a host. Raises `LayerShuffleError` if there is none."""
        try:
            os.kill(self.pids[name], number)
        # The second one: it has ended, and nobody has noticed yet.
        except (KeyError, ProcessLookupError) as error:
            raise LayerShuffleError(f"The process of {name} has ended") from error

    def hold(self, name: str) -> None:
        """Do not start the host again until `release`."""
        self._held[name].clear()

    def holds(self, name: str) -> bool:
        """Whether a host of this machine stays away, as it was told to."""
        return name in self._held and not self._held[name].is_set()

    def release(self, name: str) -> None:
        """Start the host if it does not run."""
        self._held[name].set()

    async def _keep(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        limits = self._limits
        ends = 0
        while True:
            await self._held[name].wait()
            begun = loop.time()
            try:
                end = await self._run(name)
            except OSError as error:  # the machine has no process or file left: it may have again
                end = f"cannot be started: {one_line(error)}"
            if 1000 * (loop.time() - begun) >= limits.stable_ms:
                ends = 0
            ends += 1
            if end and not self.holds(name):
                _log.warning("The process of host %s %s", name, end)
            else:
                _log.info("The process of host %s has ended, as it was asked to", name)
            await asyncio.sleep(limits.restart_pause_ms(ends) / 1000)

    async def _run(self, name: str) -> str:
        """Start the process of a host and wait for its end.

        Returns how it ended, with the last error that it wrote; "" if it was asked to end.
        """
        words = (*self._words, "--name", name)
        reading, writing = os.pipe()
        try:
            os.write(writing, self._token)
            self._processes[name] = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "layershuffle_host", *words),
                stdin=reading,
                stderr=asyncio.subprocess.PIPE,
                preexec_fn=_die_with_parent,
            )
        finally:
            os.close(reading)
            os.close(writing)
        tail = b""
        assert process.stderr is not None
        # Not by lines, of which a reader refuses long ones.
        while more := await process.stderr.read(_KEPT):
            tail = (tail + more)[-_KEPT:]
        code = await process.wait()
        return f"has ended ({code}){_last_error(tail)}" if code else ""


def _last_error(tail: bytes) -> str:
    """ ": " and the last line that a process wrote beside its log; "" if there is none.

    The error that ends a process is no line of its log: Python writes it, or the host's command.
    """
    for line in reversed(tail.decode(errors="replace").splitlines()):
        if line.strip() and not _LOGGED.match(line):
            return f": {printable(line.strip())}"
    return ""


# Loaded here, because nothing may be imported between fork and exec.
_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    # Also when the gateway is killed, and can end nobody.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
