"""Which files of ours do an image, an order and a request pass? Counted by what runs.

    python scripts/walks.py fit eval gateway

`fit`: the images of one step, from their files to the gradients. `eval`: one order, from the
command to its row. `gateway`: a request from the socket to the answer, with its visits at a host
that runs in this process; what watches over the swarm meanwhile is counted as well. A file is
listed where the first of its functions is called. What is imported on the way does not count.
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


class EnteredFiles:
    """A profile function that notes which files of ours are entered while `on`, in all threads."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.on = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note the file of a function that is called."""
        if not self.on or event != "call" or frame.f_code.co_name == "<module>":
            return
        path = Path(frame.f_code.co_filename)
        for package in PACKAGES:
            if path.is_relative_to(package):
                name = str(path.relative_to(package.parent))
                if name not in self.files:
                    self.files.append(name)

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


def walk_of_fit(folder: Path, *, method: str = "anyorder") -> list[str]:
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
    return walk.files


def walk_of_eval(folder: Path) -> list[str]:
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
    return walk.files


def walk_of_gateway(folder: Path) -> list[str]:
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
    return walk.files


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


WALKS: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "fit": ("the images of a step in fit, from their files to the gradients", walk_of_fit),
    "eval": ("one order in eval, from the command to its row", walk_of_eval),
    "gateway": ("a request, from the gateway's socket to the answer", walk_of_gateway),
}


if __name__ == "__main__":
    for name in sys.argv[1:] or WALKS:
        title, walk_of = WALKS[name]
        with tempfile.TemporaryDirectory() as place:
            files = walk_of(Path(place))
        print(f"{title}: {len(files)} files")
        for file in files:
            print(f"  {file}")
