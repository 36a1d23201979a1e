"""Which files of ours do an image, an order and a request pass? Counted by what runs.

    python scripts/walks.py fit eval gateway

`fit`: the images of one step, from their files to the gradients. `eval`: one order and its batch,
from the command to the row. `gateway`: a request from the socket to the answer, with its visits at
a host that runs in this process. A file is listed where the first of its functions is called. What
is imported on the way does not count.

What else runs meanwhile is listed apart, as far as its files are not in the walk: in `eval` what
reads the command, opens model and data and prepares the machine, once for all orders; in a gateway
what it does whether or not there is a request, by its timers and for every connection.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from asyncio import run
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from inspect import unwrap
from pathlib import Path
from types import FrameType
from unittest.mock import patch

import numpy as np
from PIL import Image

import layershuffle as ls
import layershuffle_host
from layershuffle.cli import main, parse
from layershuffle.cli.command import ComputingCommand
from layershuffle.core.compiling import BlockCompiler
from layershuffle.ground.bundled import asset
from layershuffle.ground.machine import hardware, versions
from layershuffle.models import load
from layershuffle.scoring import evaluate_spec
from layershuffle_host.host import Host

PACKAGES = [Path(*package.__path__) for package in (ls, layershuffle_host)]
MODEL = "timm:vit_tiny_patch16_224?pretrained=false&img_size=32&embed_dim=32&depth=4&num_heads=2"
_PATIENCE = 120.0  # seconds until a swarm is up
# What `eval` does once, however many orders it scores.
_READING = "reading the command, once for all orders"
_MODEL = "opening the model, once for all orders"
_DATA = "opening the data, once for all orders"
_MACHINE = "preparing the machine and naming it in the report, once for all orders"
_ONCE = {
    parse.__code__: _READING,
    load.__code__: _MODEL,
    evaluate_spec.open_scored.__code__: _DATA,
    unwrap(ComputingCommand.computing).__code__: _MACHINE,
    evaluate_spec.scoring_device.__code__: _MACHINE,
    evaluate_spec.block_compiler.__code__: _MACHINE,
    evaluate_spec.prepare.__code__: _MACHINE,
    BlockCompiler.report.__code__: _MACHINE,
    hardware.__code__: _MACHINE,
    versions.__code__: _MACHINE,
}
# Where the event loop enters a gateway without a request: the looks at connections, hosts and
# files, the audits of hosts, and what is done once for a connection.
_MEANWHILE = {
    ("gateway/hosts/service.py", "_keep_watch"),
    ("gateway/hosts/health.py", "run"),
    ("gateway/hosts/health.py", "_turn"),
    ("gateway/hosts/health.py", "_audit"),
    ("gateway/hosts/health.py", "_audited"),
    ("gateway/hosts/connections.py", "_ping"),
    ("gateway/http/upkeep.py", "run"),
    ("gateway/http/listening.py", "_watch"),
    ("gateway/http/listening.py", "accept"),
    ("gateway/http/listening.py", "_next_turn"),
    ("gateway/http/listening.py", "close"),
}


class EnteredFiles:
    """A profile function that notes which files of ours are entered while `on`, in all threads.

    `part_of` names the part of the work that a call belongs to, if it is no part of the walk.
    """

    def __init__(self, part_of: Callable[[FrameType], str | None] = lambda _: None) -> None:
        self.files: list[str] = []
        self.on = False
        self._part_of = part_of
        self._parts: dict[str, list[str]] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note the file of a function that is called."""
        if not self.on or event != "call" or frame.f_code.co_name == "<module>":
            return
        name = our_file(frame)
        if name is None or name in self.files:
            return
        part = self._part_of(frame)
        noted = self.files if part is None else self._parts.setdefault(part, [])
        if name not in noted:
            noted.append(name)

    def apart(self) -> dict[str, list[str]]:
        """By part of the work, the files that it enters and the walk does not."""
        others: dict[str, list[str]] = {}
        for part, files in self._parts.items():
            others[part] = [file for file in files if file not in self.files]
        return others

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Call this object at every call within, in this thread and in threads that begin here."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def our_file(frame: FrameType) -> str | None:
    """The file of a called function below the folder of its package; `None` if it is not ours."""
    path = Path(frame.f_code.co_filename)
    for package in PACKAGES:
        if path.is_relative_to(package):
            return str(path.relative_to(package.parent))
    return None


def part_once(frame: FrameType) -> str | None:
    """What runs once for all orders and has called `frame`, if anything."""
    part: str | None = None
    caller: FrameType | None = frame
    while caller is not None:
        part = _ONCE.get(caller.f_code, part)
        caller = caller.f_back
    return part


def part_meanwhile(frame: FrameType) -> str | None:
    """What a gateway does without a request, if the first of our functions on the stack below
    `frame` is one of `_MEANWHILE`."""
    first = "", ""
    caller: FrameType | None = frame
    while caller is not None:
        name = our_file(caller)
        # The command line started the event loop that calls all others.
        if name is not None and not name.startswith("layershuffle/cli/"):
            first = name.partition("/")[2], caller.f_code.co_name
        caller = caller.f_back
    return "meanwhile, whether or not there is a request" if first in _MEANWHILE else None


def pictures(folder: Path) -> Path:
    """Grey noise as PNG files: a train and a test split of two classes."""
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            place = folder / split / label
            place.mkdir(parents=True)
            for number in range(8):
                noise = random.integers(256, size=(32, 32), dtype=np.uint8)
                Image.fromarray(noise).save(place / f"{number}.png")
    return folder


def walk_of_fit(folder: Path) -> EnteredFiles:
    """The files that the images of the third step pass: what is done once is over by then."""
    walk = EnteredFiles()

    def notice(phase: str, step: int) -> None:
        walk.on = step == 2 and phase in ("data", "forward", "backward")

    with walk.watching():
        ls.fit(
            model=MODEL,
            data=f"folder:{pictures(folder / 'data')}",
            out=folder / "run",
            steps=4,
            batch_size=4,
            workers=0,
            device="cpu",
            on_phase=notice,
        )
    return walk


def walk_of_eval(folder: Path) -> EnteredFiles:
    """The files that one order and its batch pass, from the command to the row."""
    walk = EnteredFiles(part_once)
    data = f"folder:{pictures(folder / 'data')}"
    words = [
        "eval",
        f"{MODEL}&num_classes=2",
        "--data",
        data,
        "--order",
        "3,0,2",
        "--device",
        "cpu",
    ]
    # Images are read in this process, where they are seen, and not in processes of a loader.
    here = patch.object(evaluate_spec, "loader_processes", return_value=0)
    with redirect_stdout(io.StringIO()), here:
        main(words)  # imports what it needs
        with walk.watching():
            walk.on = True
            main(words)
    return walk


def walk_of_gateway(folder: Path) -> EnteredFiles:
    """The files that a request passes between the gateway's socket and the end of its answer."""
    walk = EnteredFiles(part_meanwhile)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["swarm", "up", "--hosts", "0", "--port", str(port), "--state", str(folder)]
    answers: list[str] = []

    def ask() -> None:
        answers.append(until_it_answers(port, folder, walk))

    client = threading.Thread(target=ask)
    with walk.watching(), redirect_stdout(io.StringIO()):
        client.start()
        main(words)
    client.join()
    if "degraded" not in answers[0]:
        raise RuntimeError(f"The gateway has not classified the image: {answers[0]}")
    return walk


def until_it_answers(port: int, folder: Path, walk: EnteredFiles) -> str:
    """Join the gateway as its only host, and ask it twice; the second answer is walked.

    Ends the gateway as Ctrl-C does.
    """
    sys.setprofile(None)  # the client is not part of the walk
    address = f"http://127.0.0.1:{port}"
    try:
        opened(f"{address}/livez")
        token = (folder / "host-token").read_text().strip()
        host = Host([f"ws://127.0.0.1:{port}"], token=token, name="host", cache=folder / "cache")
        hosting = threading.Thread(target=lambda: run(host.run()))
        hosting.start()
        opened(f"{address}/readyz")
        request = f"{address}/v1/classify?min_blocks=10&deadline_ms=30000"
        image = asset("digit-pair.png").read_bytes()
        opened(request, image)
        walk.on = True
        answer = opened(request, image)
        walk.on = False
        host.drain()
        hosting.join()
        return answer
    finally:
        os.kill(os.getpid(), signal.SIGINT)


def opened(url: str, body: bytes | None = None) -> str:
    """The answer at `url`, as soon as there is one without an error."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(url, body, timeout=60) as answer:
            text: str = answer.read().decode()
            return text
        time.sleep(0.2)
    raise TimeoutError(f"{url} gives no answer")


WALKS: dict[str, tuple[str, Callable[[Path], EnteredFiles]]] = {
    "fit": ("the images of a step in fit, from their files to the gradients", walk_of_fit),
    "eval": ("one order and its batch in eval, from the command to the row", walk_of_eval),
    "gateway": ("a request, from the gateway's socket to the answer", walk_of_gateway),
}


if __name__ == "__main__":
    for name in sys.argv[1:] or WALKS:
        title, walk_of = WALKS[name]
        with tempfile.TemporaryDirectory() as place:
            walk = walk_of(Path(place))
        for part, files in {title: walk.files, **walk.apart()}.items():
            print(f"{part}: {len(files)} files")
            for file in files:
                print(f"  {file}")
