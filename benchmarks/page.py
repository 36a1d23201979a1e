"""Claim: the page is up in seconds, answers a click at once, and its viewers cost answers little.

The viewers are a process of its own, which reads the events of twenty connections.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from _clocks import SMOKE, Effort
from _harness import Bound, Claim, ClaimRow, run_claim

from layershuffle.bundled import asset
from layershuffle.swarm.plan import even_plan
from layershuffle.swarm.server.app import create_app
from layershuffle.swarm.server.gateway_page import PageOptions
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.server.run import ListeningSocket, Server
from layershuffle.swarm.service import swarm_on

VIEWERS, HOSTS, STARTS, PLENTY = 20, 4, 3, 100_000.0
ORDER = "7,2,10,0,5,11,3,8,1,9,4,6"
LIMITS = GatewayLimits(rate=PLENTY, burst=PLENTY)
# Standard library alone. It says "seen" once every viewer has an event, and reads on until killed.
WATCHING = """
import http.client, sys, threading
port, viewers = map(int, sys.argv[1:])
seen = threading.Barrier(viewers + 1)
def watch():
    gateway = http.client.HTTPConnection("127.0.0.1", port)
    gateway.request("GET", "/page/live")
    events = gateway.getresponse()
    events.readline()
    seen.wait()
    while events.readline(): pass
for _ in range(viewers): threading.Thread(target=watch, daemon=True).start()
seen.wait()
print("seen", flush=True)
threading.Event().wait()
"""

# Beside the gateway, whose interpreter it would share otherwise.
ASKING = """
import http.client, json, sys, time
port, path, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
body, seconds = sys.stdin.buffer.read(), []
form = {"Content-Type": "multipart/form-data; boundary=cut"}
gateway = http.client.HTTPConnection("127.0.0.1", port)
for _ in range(count):
    begun = time.perf_counter()
    gateway.request("POST", path, body, form)
    answer = gateway.getresponse()
    text = answer.read()
    assert answer.status == 200, text
    seconds.append(time.perf_counter() - begun)
print(json.dumps(seconds))
"""


@contextmanager
def gateway() -> Iterator[int]:
    """The port of a gateway with its page, to hosts of this process, on a loop in a thread."""
    ports: list[int] = []
    ready, end = threading.Event(), threading.Event()

    async def serve() -> None:
        async with swarm_on(None, even_plan(12, HOSTS)) as service:
            app = create_app(
                service.remote_model,
                limits=LIMITS,
                calibration=service.calibration,
                model=service.plan.model,
                page=PageOptions(),
            )
            with ListeningSocket("127.0.0.1", port=0, limits=LIMITS) as listener:
                server = Server(app, limits=LIMITS)
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                ports.append(listener.getsockname()[1])
                ready.set()
                await asyncio.to_thread(end.wait)
                server.should_exit = True
                await serving

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield ports[0]
    finally:
        end.set()
        thread.join()


@contextmanager
def watched(port: int) -> Iterator[None]:
    """Twenty viewers read the events of the gateway inside."""
    words = [sys.executable, "-c", WATCHING, str(port), str(VIEWERS)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as viewers:
        assert viewers.stdout is not None
        viewers.stdout.readline()
        try:
            yield
        finally:
            viewers.kill()


def asked(port: int, path: str, *, field: tuple[str, str], count: int) -> list[float]:
    """Seconds of each of `count` requests with the packaged picture, by a process of its own."""
    name, text = field
    head = b'--cut\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    file = b'--cut\r\nContent-Disposition: form-data; name="image"; filename="pair.png"\r\n\r\n'
    parts = [head % (name.encode(), text.encode()), file, asset("digit-pair.png").read_bytes()]
    words = [sys.executable, "-c", ASKING, str(port), path, str(count)]
    body = b"".join([*parts, b"\r\n--cut--\r\n"])
    done = subprocess.run(words, input=body, capture_output=True, check=True)
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def up() -> tuple[float, float]:
    """Seconds from `layershuffle demo` to its page, and to the first that its models say."""
    begun = time.perf_counter()
    words = ["-m", "layershuffle", "demo", "--port", "0", "--no-browser"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        port = int(demo.stdout.readline().split()[4].rpartition(":")[2])
        times = []
        for path in ("/", "/page/facts"):
            with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                connection.request("GET", path)
                connection.getresponse().read()
            times.append(time.perf_counter() - begun)
        demo.kill()
    return times[0], times[1]


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """The start of the demo, a click, and answers with and without viewers, in turn."""
    starts = [up() for _ in range(1 if effort is SMOKE else STARTS)]
    for what, part in (("until its page is there", 0), ("until its models can be asked", 1)):
        values = tuple(start[part] for start in starts)
        yield ClaimRow(
            name="layershuffle demo", what=what, values=values, unit="s", bound=Bound("at_most", 5)
        )
    turns = 2 if effort is SMOKE else 200
    with gateway() as port:
        # The models of the page are loaded for the very first one.
        first, *clicks = asked(port, "/page/answer", field=("order", ORDER), count=turns + 1)
        yield ClaimRow(
            name="a click",
            what="until both models have answered",
            values=tuple(1000 * seconds for seconds in clicks),
            unit="ms",
            bound=Bound("at_most", 300),
            facts={"the very first, ms": 1000 * first},
        )

        def ask() -> float:
            return statistics.median(asked(port, "/v1/classify", field=("top_k", "1"), count=turns))

        ask()  # warm
        ratios, alone = [], ask()
        for _ in range(effort.pairs):
            with watched(port):
                with_viewers = ask()
            # Against the mean of before and after, so that a machine that gets busier shows less.
            after = ask()
            ratios.append(with_viewers / ((alone + after) / 2))
            alone = after
    yield ClaimRow(
        name=f"an answer with {VIEWERS} viewers",
        what="time / time without viewers",
        values=tuple(ratios),
        bound=Bound("at_most", 1.1),
    )


CLAIM = Claim(theme="page", text=__doc__.removeprefix("Claim: ").partition("\n")[0], rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
