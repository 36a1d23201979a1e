"""Which files of ours do an image, an order and a request pass? Counted by what runs.

    python scripts/walks.py fit eval gateway

`fit`: the images of one step, from their files to the gradients. `eval`: one order, from the
command to its row. `gateway`: a request from the socket to the answer, with its visits at a host
that runs in this process. A file is listed where the first of its functions is called. What is
imported on the way does not count. What a gateway does whether or not there is a request, by its
timers and for every connection, is listed apart.
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
from pathlib import Path
from types import FrameType

import numpy as np
from PIL import Image

import layershuffle as ls
import layershuffle_host
from layershuffle.cli import main
from layershuffle.ground.bundled import asset
from layershuffle_host.host import Host

PACKAGES = [Path(*package.__path__) for package in (ls, layershuffle_host)]
MODEL = "timm:vit_tiny_patch16_224?pretrained=false&img_size=32&embed_dim=32&depth=4&num_heads=2"
_PATIENCE = 120.0  # seconds until a swarm is up
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

    `files`: those of the walk; `meanwhile`: those that only `_MEANWHILE` entered.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.meanwhile: list[str] = []
        self.on = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note the file of a function that is called."""
        if not self.on or event != "call" or frame.f_code.co_name == "<module>":
            return
        name = our_file(frame)
        if name is None or name in self.files:
            return
        if not is_meanwhile(frame):
            self.files.append(name)
            if name in self.meanwhile:
                self.meanwhile.remove(name)
        elif name not in self.meanwhile:
            self.meanwhile.append(name)

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


def is_meanwhile(frame: FrameType) -> bool:
    """Whether the first of our functions on the stack below `frame` is one of `_MEANWHILE`."""
    first = "", ""
    caller: FrameType | None = frame
    while caller is not None:
        name = our_file(caller)
        # The command line started the event loop that calls all others.
        if name is not None and not name.startswith("layershuffle/cli/"):
            first = name.partition("/")[2], caller.f_code.co_name
        caller = caller.f_back
    return first in _MEANWHILE


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


def walk_of_fit(folder: Path, *, method: str = "anyorder") -> EnteredFiles:
    """The files that the images of the third step pass: what is done once is over by then."""
    walk = EnteredFiles()

    def notice(phase: str, step: int) -> None:
        walk.on = step == 2 and phase in ("data", "forward", "backward")

    with walk.watching():
        ls.fit(
            method=method,
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
    """The files that one order passes, from the command to its row."""
    walk = EnteredFiles()
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
    with redirect_stdout(io.StringIO()):
        main(words)  # imports what it needs
        with walk.watching():
            walk.on = True
            main(words)
    return walk


def walk_of_gateway(folder: Path) -> EnteredFiles:
    """The files that a request passes between the gateway's socket and the end of its answer."""
    walk = EnteredFiles()
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
        request = f"{address}/v1/classify?min_blocks=12&deadline_ms=30000"
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
    "eval": ("one order in eval, from the command to its row", walk_of_eval),
    "gateway": ("a request, from the gateway's socket to the answer", walk_of_gateway),
}


if __name__ == "__main__":
    for name in sys.argv[1:] or WALKS:
        title, walk_of = WALKS[name]
        with tempfile.TemporaryDirectory() as place:
            walk = walk_of(Path(place))
        print(f"{title}: {len(walk.files)} files")
        for file in walk.files:
            print(f"  {file}")
        if walk.meanwhile:
            print(f"meanwhile, whether or not there is a request: {len(walk.meanwhile)} files")
            for file in walk.meanwhile:
                print(f"  {file}")
