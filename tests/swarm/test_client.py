"""The Python clients, blocking and not, against a gateway in this process; keys and https."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from gateway_site import HOSTS, certify, listening, picture, site
from pico_hosts import PATIENT

from clock import SkippingLoop
from common import DEPTH, FAMILIES
from layershuffle.cli import main
from layershuffle.cli.swarm.asking import ServerOptions, client_options
from layershuffle.cli.swarm.options import HttpsOptions, context_of, read_keys
from layershuffle.cli.swarm.serving import describe_service
from layershuffle.errors import UsageError
from layershuffle.swarm.bundle import make_bundle
from layershuffle.swarm.client import AsyncSwarmClient, SwarmClient, SwarmError
from layershuffle.swarm.local import LocalHosts
from layershuffle.swarm.plan import HostPlan, SwarmPlan
from layershuffle.swarm.server.admin import state_directory
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.server.start import Serving, serve_service
from layershuffle.swarm.server.tls import client_context, server_context
from layershuffle.swarm.service import Cargo, running_service
from layershuffle.swarm.state import Swarm
from waiting import HANGS

KEY = "a-key-of-some-length"
URL = "http://gateway"


class Bridge(httpx.BaseTransport):
    """Requests of a blocking client, answered by an app on another thread's event loop."""

    def __init__(self, app, loop):
        self.inner, self.loop = httpx.ASGITransport(app=app), loop

    def handle_request(self, request):
        return asyncio.run_coroutine_threadsafe(self._handle(request), self.loop).result(30)

    async def _handle(self, request):
        response = await self.inner.handle_async_request(request)
        return httpx.Response(
            response.status_code, headers=response.headers, content=await response.aread()
        )


@contextmanager
def blocking(**options):
    """(client, site) with the gateway in a thread of its own."""
    started, done, running = threading.Event(), asyncio.Event(), []

    async def serve():
        async with site(**options) as place:
            running.extend([place, asyncio.get_running_loop()])
            started.set()
            await done.wait()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    assert started.wait(120)
    place, loop = running
    try:
        with SwarmClient(URL, api_key=KEY, transport=Bridge(place.app, loop)) as client:
            yield client, place
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(30)


def test_every_kind_of_image(tmp_path):
    image = picture(3)
    path = tmp_path / "a.png"
    image.save(path)
    with blocking(keys=[KEY]) as (client, place):
        place.router.routing = "sequential"
        asked = {"top_k": 2, "deadline_ms": 5000.0, "min_blocks": 2}
        answers = [
            client.classify(image_like, **asked)
            for image_like in (image, path, str(path), path.read_bytes())
        ]
        several = client.classify([image, path])
    assert all(answer.images == answers[0].images for answer in answers)
    assert len(answers[0].images[0].top) == 2
    assert len(several.images) == 2
    assert several.images[0] == several.images[1]


def test_swarm_and_health():
    with blocking(keys=[KEY], model="pico") as (client, place):
        client.classify(picture())
        swarm, health = client.swarm(), client.health()
        place.router.swarm = Swarm()
        ill = client.health()
    assert swarm.model == "pico"
    assert {host.name: set(host.blocks) for host in swarm.hosts} == HOSTS
    assert swarm.counters == {"answered": 1}
    assert (health.ok, health.reachable_blocks) == (True, DEPTH)
    assert (ill.ok, ill.reachable_blocks) == (False, 0)


def test_errors_have_the_gateways_messages():
    with blocking(keys=[KEY]) as (client, place):
        with pytest.raises(SwarmError, match="cannot be read") as unread:
            client.classify(b"no image")
        place.router.swarm = Swarm(host for host in place.router.swarm.values() if host.name != "b")
        with pytest.raises(SwarmError) as few:
            client.classify(picture(), min_blocks=4, deadline_ms=30_000)
        stranger = SwarmClient(URL, transport=client._http._transport)
        with pytest.raises(SwarmError) as closed:
            stranger.swarm()
    assert unread.value.status == 422
    assert unread.value.hint == "send JPEG, PNG, WEBP, BMP, GIF or TIFF"
    assert (few.value.status, few.value.retry_after) == (503, 1.0)
    assert "3 of 4 blocks could be run" in str(few.value)
    assert "Where: http://gateway/v1/classify." in str(few.value)
    assert closed.value.status == 401
    assert closed.value.hint.startswith("send it as")


def test_the_async_client_is_the_same():
    async def go():
        async with site(keys=[KEY]) as place:
            transport = httpx.ASGITransport(app=place.app)
            async with AsyncSwarmClient(URL, api_key=KEY, transport=transport) as client:
                answer = await client.classify([picture(1), picture(2)])
                swarm, health = await client.swarm(), await client.health()
                with pytest.raises(SwarmError) as error:
                    await client.classify(picture(), min_blocks=9)
            return answer, swarm, health, error.value

    answer, swarm, health, error = asyncio.run(go())
    assert len(answer.images) == 2
    assert len(swarm.hosts) == health.usable_hosts == 3
    assert error.cause == "min_blocks is 9, but the model has 4 blocks"


def answering(handler):
    return SwarmClient(URL, transport=httpx.MockTransport(handler))


def test_addresses_without_a_gateway():
    def refuse(request):
        raise httpx.ConnectError("Connection refused")

    def sleep(request):
        raise httpx.ReadTimeout("")

    cases = {
        "cannot be reached (Connection refused)": refuse,
        "did not answer in time": sleep,
        "(HTTP 200) is not one of": lambda request: httpx.Response(200, text="<html>"),
        "(HTTP 502) is not one of": lambda request: httpx.Response(502, text="Bad Gateway"),
        "(HTTP 302) is not one of": lambda request: httpx.Response(302, headers={"location": "/"}),
    }
    for words, handler in cases.items():
        with answering(handler) as client, pytest.raises(SwarmError) as error:
            client.health()
        assert words in error.value.cause
        assert error.value.hint


def test_wrong_use():
    with answering(lambda request: httpx.Response(500)) as client:
        for wrong, words in [([], "no image"), (3, "int is not an image"), ("/no/file", "read")]:
            with pytest.raises(UsageError, match=words):
                client.classify(wrong)
    for url in ("127.0.0.1:8000", "ftp://host", "http://", "http://[::", ""):
        with pytest.raises(UsageError, match="not the address of a gateway"):
            SwarmClient(url)


def test_the_client_needs_no_torch():
    code = (
        "import sys, layershuffle.swarm.client; "
        "sys.exit(bool({'torch', 'fastapi', 'scipy', 'timm'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_keys_that_no_header_carries():
    for key in ("a\r\nHost: b", "schl\u00fcssel-der-lang-ist"):
        with pytest.raises(UsageError, match="ASCII letters, digits and signs"):
            SwarmClient(URL, api_key=key)


# --- keys on the command line ---------------------------------------------------------------------


def written(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("LAYERSHUFFLE_API_KEY", raising=False)
    file = written(tmp_path / "key", f"{KEY}\n")
    assert client_options(ServerOptions()) == {"api_key": None, "authority": None}
    assert client_options(ServerOptions(api_key_file=file))["api_key"] == KEY
    monkeypatch.setenv("LAYERSHUFFLE_API_KEY", "of-the-environment")
    assert client_options(ServerOptions())["api_key"] == "of-the-environment"
    assert client_options(ServerOptions(api_key_file=file))["api_key"] == KEY
    assert client_options(ServerOptions(api_key="on the line"))["api_key"] == "on the line"
    for gateway, words in [
        (ServerOptions(api_key_file=file, api_key="another"), "given twice"),
        (ServerOptions(api_key_file=written(tmp_path / "two", "one\ntwo\n")), "holds 2 keys"),
    ]:
        with pytest.raises(UsageError, match=words):
            client_options(gateway)


def test_key_files_that_others_may_read_are_refused(tmp_path):
    assert read_keys(None) == ()
    assert read_keys(written(tmp_path / "own", "one\ntwo\n")) == ("one", "two")
    for path, words in [
        (written(tmp_path / "group", "one", 0o640), "Other users may read or change"),
        (written(tmp_path / "empty", " \n"), "is empty"),
        (tmp_path / "missing", "does not exist"),
    ]:
        with pytest.raises(UsageError, match=words):
            read_keys(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(tmp_path / "binary")


# --- https ----------------------------------------------------------------------------------------

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the command openssl, to make certificates"
)


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    """A directory with ca.pem, cert.pem and key.pem for 127.0.0.1."""
    place = tmp_path_factory.mktemp("papers")
    certify(place)
    return place


@contextmanager
def started(serving, loop=asyncio.new_event_loop):
    """What `serving(told)` tells from a thread of its own, on the event loop that `loop` makes; it
    is cancelled at the end."""
    reports, ready, running = [], threading.Event(), []

    def tell(what):
        reports.append(what)
        ready.set()

    async def go():
        running.extend([asyncio.current_task(), asyncio.get_running_loop()])
        try:
            await serving(tell)
        except asyncio.CancelledError:
            pass
        finally:
            ready.set()

    def run():
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(go())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(HANGS)
        yield reports[0]
    finally:
        task, its_loop = running
        its_loop.call_soon_threadsafe(task.cancel)
        thread.join(30)


@needs_openssl
def test_https_from_the_flags_to_the_answer(papers, tmp_path, capsys, monkeypatch):
    """A swarm with certificate and key, asked by both clients and on the command line."""
    hosts = {"a": HostPlan(blocks=(0, 1, 2, 3))}
    plan = SwarmPlan(model="pico", hosts=hosts, limits=PATIENT)
    keys = written(tmp_path / "keys", KEY)
    monkeypatch.delenv("LAYERSHUFFLE_API_KEY", raising=False)

    async def serving(tell):
        model = FAMILIES["timm-vit"].wrapped()
        cargo = Cargo(model, make_bundle(model), None)
        hosts = LocalHosts(list(plan.hosts), limits=plan.limits)
        async with running_service(plan, cargo, backend=hosts, within=60) as service:
            papers_of_server = HttpsOptions(
                https_certificate=papers / "cert.pem", https_key=papers / "key.pem"
            )
            await serve_service(
                service,
                Serving(
                    state=state_directory(str(tmp_path / "s")),
                    port=0,
                    keys=read_keys(keys),
                    tls=context_of(papers_of_server),
                    page=False,
                ),
                ready=lambda url: tell(
                    (url, describe_service(service, url, state=None, keyed=True))
                ),
            )

    image = tmp_path / "image.png"
    picture().save(image)
    with started(serving) as (url, text):
        assert url.startswith("https://127.0.0.1:")
        assert f"classify IMAGE --address {url} --authority FILE --api-key-file FILE\n" in text
        with SwarmClient(url, api_key=KEY, authority=papers / "ca.pem") as client:
            assert sorted(client.classify(image).blocks) == list(range(DEPTH))
            assert client.health().watching is True
            assert client.swarm().audits.disagreed == 0
            assert {host.carrier for host in client.swarm().hosts} == {"process"}
        assert asyncio.run(asked(url, papers)) == DEPTH
        flags = ["--address", url, "--authority", str(papers / "ca.pem")]
        assert main(["classify", str(image), *flags, "--api-key-file", str(keys), "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["blocks"]) == DEPTH
        monkeypatch.setenv("LAYERSHUFFLE_API_KEY", KEY)
        # Each image has a request, and so a route, of its own, and may be refused alone.
        among = ["classify", str(image), str(keys), str(image)]
        assert main([*among, *flags]) == 1
        lines, (refused,) = map(str.splitlines, capsys.readouterr())
        assert sum(line.startswith(f"{image}: ") for line in lines) == 2
        assert sum(f"{DEPTH} of {DEPTH} blocks in" in line for line in lines) == 2
        assert f"error: {keys} was not classified: The image cannot be read. Where: " in refused
        assert main([*among, "none.png", *flags, "--json"]) == 2
        answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [len(answer.get("images", ())) for answer in answers] == [1, 0, 1, 0]
        assert answers[1]["error"]["cause"] == "The image cannot be read"
        assert main(["swarm", "status", *flags]) == 0
        assert "healthy" in capsys.readouterr().out
        for address, authority, words in [
            (url, None, "certificate is not trusted"),
            (url.replace("127.0.0.1", "localhost"), papers / "ca.pem", "is not trusted"),
            (url.replace("https", "http"), None, "cannot be reached"),
        ]:
            client = SwarmClient(address, api_key=KEY, authority=authority)
            with client, pytest.raises(SwarmError, match=words):
                client.swarm()


async def asked(url, papers):
    async with AsyncSwarmClient(url, api_key=KEY, authority=papers / "ca.pem") as client:
        return (await client.health()).reachable_blocks


@needs_openssl
def test_handshakes_that_do_not_come_are_closed(papers):
    """A connection without a handshake is limited like one without a request."""
    # No machine is so slow: the test moves the server's clock beyond it.
    limits = GatewayLimits(head_ms=10_000 * HANGS, client_connections=1)
    tls = server_context(papers / "cert.pem", papers / "key.pem")

    async def serving(tell):
        loop = asyncio.get_running_loop()
        skip = partial(loop.call_soon_threadsafe, loop.skip, 11 * HANGS)
        async with site() as place, listening(place.app, limits, tls=tls) as (_, port):
            tell((port, skip))
            await asyncio.Event().wait()

    def connection(port):
        return socket.create_connection(("127.0.0.1", port), timeout=HANGS)

    def is_open(silent):
        silent.settimeout(0.02)
        try:
            return silent.recv(1) != b""
        except TimeoutError:
            return True

    with started(serving, SkippingLoop) as (port, skip):
        for _ in range(2):  # the second has the place of the first, which is free again
            with connection(port) as silent:
                with connection(port) as beyond:
                    assert beyond.recv(1) == b"", "it is refused at once"
                assert is_open(silent)
                while is_open(silent):
                    skip()
        url = f"https://127.0.0.1:{port}"
        with SwarmClient(url, authority=papers / "ca.pem") as client:
            assert client.health().ok


@needs_openssl
def test_certificates_that_cannot_be_used(papers, tmp_path):
    certificate, key = papers / "cert.pem", papers / "key.pem"
    shown = written(tmp_path / "shown.pem", key.read_text(), 0o644)
    locked = tmp_path / "locked.pem"
    words = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(words, check=True, capture_output=True, timeout=HANGS)
    locked.chmod(0o600)
    for chain, secret, phrase in [
        (certificate, shown, "Other users may read"),
        (certificate, locked, "The key is encrypted"),
        (papers / "ca.pem", key, "cannot be used"),
        (papers / "missing", key, "cannot be used .No such file"),
        (certificate, papers / "missing", "does not exist"),
        (key, key, "cannot be used"),
    ]:
        with pytest.raises(UsageError, match=phrase):
            server_context(chain, secret)
    for authority in (papers / "missing", written(tmp_path / "no.pem", "no certificate")):
        with pytest.raises(UsageError, match="authority's certificate cannot be read"):
            client_context(authority)
    with pytest.raises(UsageError, match="An authority has no effect on http:"):
        SwarmClient(URL, authority=papers / "ca.pem")
    assert context_of(HttpsOptions()) is None
    for half in (HttpsOptions(https_key=key), HttpsOptions(https_certificate=certificate)):
        with pytest.raises(UsageError, match="a certificate and its key"):
            context_of(half)


@needs_openssl
def test_deploy_warns_of_keys_in_clear(papers, tmp_path, capsys):
    """Before anything is loaded, where an address without keys is refused, too."""
    plan = written(tmp_path / "plan.yaml", "model: dir:/nowhere\nhosts: {a: {blocks: [0]}}\n")
    keys = written(tmp_path / "keys", KEY)
    words = ["swarm", "deploy", str(plan), "--address", "10.0.0.1:6400", "--bind", "0.0.0.0"]
    words += ["--port", "0", "--token", str(tmp_path / "absent")]  # so that it asks no machine
    files = ["--https-certificate", papers / "cert.pem", "--https-key", papers / "key.pem"]

    def said(*more):
        assert main([*words, *map(str, more)]) != 0
        return capsys.readouterr().err

    clear = said("--keys", keys)
    assert clear.startswith("warning: API keys, images and answers are sent to and from 0.0.0.0")
    assert "copy it from the head" in clear
    assert "warning" not in said("--keys", keys, *files)
    assert "without an API key" in said(*files)
    Path(keys).chmod(0o604)
    assert "Other users may read or change the swarm's API keys" in said("--keys", keys)
