"""The Python clients, blocking and not, against a gateway in this process; keys and https."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from gateway_site import HOSTS, certify, picture, site, started

from clock import SkippingLoop
from common import DEPTH
from exported import HOSTED
from layershuffle.cli import main
from layershuffle.cli.asking import ServerOptions
from layershuffle.cli.serving import UpCommand
from layershuffle.gateway.brain.settings import SwarmSettings
from layershuffle.gateway.brain.state import Swarm
from layershuffle.gateway.client.client import AsyncSwarmClient, SwarmClient, SwarmError
from layershuffle.gateway.hosts.served_model import ServedModel
from layershuffle.gateway.http.admission import GatewayLimits
from layershuffle.gateway.http.listening import listening
from layershuffle.gateway.http.secrets import client_context, read_keys, server_context
from layershuffle.gateway.http.start import Serving, serve_swarm
from layershuffle.ground.bundled import asset
from layershuffle.ground.errors import UsageError
from pictures import file_of
from refusals import refuses
from waiting import HANGS, until

KEY = "a-key-of-some-length"
URL = "http://gateway"


@contextmanager
def blocking(**options):
    """(client, site) with the gateway in a thread of its own."""

    async def serving(tell):
        async with site(**options) as place, listening(place.app) as (listener, _):
            tell((f"http://127.0.0.1:{listener.port}", place))
            await asyncio.Event().wait()

    with started(serving) as (url, place), SwarmClient(url, api_key=KEY, patience=0) as client:
        yield client, place


def test_every_kind_of_image(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(file_of(picture(3)))
    # One host, so that all answers take one way.
    with blocking(keys=[KEY], hosts={"a": set(range(DEPTH))}) as (client, _):
        answers = [
            client.classify(image_like, top=2, deadline_ms=5000.0, min_blocks=2)
            for image_like in (path, str(path), path.read_bytes())
        ]
    assert all(answer.top == answers[0].top for answer in answers)
    assert len(answers[0].top) == 2


def test_the_swarm_as_it_is():
    with blocking(keys=[KEY], model="pico") as (client, _):
        client.classify(file_of(picture()))
        swarm = client.swarm()
    assert swarm.model == "pico"
    assert {host.name: set(host.blocks) for host in swarm.hosts} == HOSTS
    assert swarm.counters == {"answered": 1}


def test_errors_have_the_gateways_messages():
    with blocking(keys=[KEY]) as (client, place):
        with pytest.raises(SwarmError, match="cannot be read") as unread:
            client.classify(b"no image")
        place.router.swarm = Swarm(host for host in place.router.swarm.values() if host.name != "b")
        with pytest.raises(SwarmError) as few:
            client.classify(file_of(picture()), min_blocks=4, deadline_ms=30_000)
        with (
            SwarmClient(few.value.place.partition("/v1")[0]) as stranger,
            pytest.raises(SwarmError) as closed,
        ):
            stranger.swarm()
    assert unread.value.status == 422
    assert unread.value.hint == "send JPEG, PNG or WEBP"
    assert (few.value.status, few.value.retry_after) == (503, 1.0)
    assert "3 of 4 blocks could be run" in str(few.value)
    assert "/v1/classify?" in few.value.place
    assert closed.value.status == 401
    assert closed.value.hint.startswith("send it as")


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
            client.swarm()
        assert words in error.value.cause
        assert error.value.hint


def test_wrong_use(monkeypatch):
    with (
        answering(lambda request: httpx.Response(500)) as client,
        pytest.raises(UsageError, match="read"),
    ):
        client.classify("/no/file")
    with pytest.raises(UsageError, match="no gateway to ask"):
        SwarmClient()
    urls = "127.0.0.1:8000 ftp://host http:// http://[:: http://h:abc http://h:65536"
    for url in ("", *urls.split()):
        with pytest.raises(UsageError, match="not the address of a gateway"):
            SwarmClient(url)
    # httpx would send the password alone.
    with refuses(UsageError):
        SwarmClient("http://user:password@host", api_key=KEY)
    for proxy in ("socks5://host", "ftp://host", "http://host:abc"):
        monkeypatch.setenv("ALL_PROXY", proxy)
        with refuses(UsageError, "ALL_PROXY, HTTP_PROXY or HTTPS_PROXY"):
            SwarmClient("http://host")
    # No machine has a name with an empty label, and it is refused before it is looked up.
    nowhere = SwarmClient("http://a..b", transport=httpx.AsyncHTTPTransport())
    with nowhere, pytest.raises(SwarmError, match="cannot be reached"):
        nowhere.swarm()


# --- several gateways, and Retry-After ------------------------------------------------------------


class Clock:
    """Virtual time for the pauses of a client."""

    def __init__(self, monkeypatch):
        self.now, self.pauses = 0.0, []
        monkeypatch.setattr("layershuffle.gateway.client.client.time", self)
        monkeypatch.setattr("layershuffle.gateway.client.client.asyncio.sleep", self.sleep)

    def monotonic(self):
        return self.now

    async def sleep(self, seconds):
        if seconds:
            self.pauses.append(seconds)
            self.now += seconds


def busy(status, seconds):
    body = {"error": {"cause": "busy", "hint": "wait", "id": None}}
    return httpx.Response(status, json=body, headers={"retry-after": str(seconds)})


def answer_of(model="pico"):
    facts = {"model": model, "depth": 4, "unreachable_blocks": [], "hosts": [], "counters": {}}
    audits = {"audited": 0, "disagreed": 0}
    return httpx.Response(200, json={**facts, "audits": audits, "expected": None})


def test_a_refusal_for_the_moment_is_repeated_when_it_says(monkeypatch):
    """Up to half later, drawn, so that clients do not come back together; never beyond patience."""
    clock, answers = Clock(monkeypatch), [busy(429, 2), busy(429, 3)]
    with answering(lambda _: answers.pop(0) if answers else answer_of()) as client:
        assert client.swarm().model == "pico"
    first, second = clock.pauses
    assert 2 <= first <= 3
    assert 3 <= second <= 4.5
    clock.pauses.clear()
    with answering(lambda _: busy(503, 6)) as client, pytest.raises(SwarmError) as error:
        client.swarm()
    assert error.value.status == 503
    assert len(clock.pauses) == 1, "a second pause would end after ten seconds"


def test_what_no_wait_cures_is_not_repeated(monkeypatch):
    clock, asked = Clock(monkeypatch), []

    def refuse(request):
        asked.append(request)
        return busy(422, 1)

    with answering(refuse) as client, pytest.raises(SwarmError):
        client.swarm()
    assert (len(asked), clock.pauses) == (1, [])


def test_a_broken_gateway_is_like_one_that_is_gone(monkeypatch):
    clock, asked = Clock(monkeypatch), []

    def answer(request):
        asked.append(request.url.host)
        return busy(500, 1) if request.url.host == "first" else answer_of("second")

    transport = httpx.MockTransport(answer)
    with SwarmClient("http://first", "http://second", transport=transport) as client:
        assert client.swarm().model == "second"
    assert (asked, clock.pauses) == (["first", "second"], [])


@pytest.mark.parametrize("proxied", [False, True])
def test_the_next_gateway_is_asked_and_kept(monkeypatch, proxied):
    clock, asked = Clock(monkeypatch), []

    def answer(request):
        asked.append(request.url.host)
        if request.url.host == "first":
            if proxied:
                return httpx.Response(502, text="<h1>Bad Gateway</h1>")
            raise httpx.ConnectError("Connection refused")
        return answer_of(request.url.host)

    transport = httpx.MockTransport(answer)
    with SwarmClient("http://first", "http://second", transport=transport) as client:
        assert [client.swarm().model, client.swarm().model] == ["second", "second"]
    assert (asked, clock.pauses) == (["first", "second", "second"], [])
    dead = httpx.MockTransport(lambda _: answer(httpx.Request("GET", "http://first")))
    with (
        SwarmClient("http://a", "http://b", transport=dead) as client,
        pytest.raises(SwarmError, match="is not one of" if proxied else "cannot be reached"),
    ):
        client.swarm()


def test_four_hundred_requests_while_a_gateway_ends():
    """Of two gateways one ends at request 150, with those in flight: all are answered."""
    file, limits = file_of(picture()), GatewayLimits()

    async def go():
        async with site(limits=limits) as one, site(limits=limits) as two:
            async with AsyncExitStack() as first:
                dying, _ = await first.enter_async_context(listening(one.app, limits=limits))
                async with listening(two.app, limits=limits) as (staying, _):
                    urls = [f"http://127.0.0.1:{end.port}" for end in (dying, staying)]
                    async with AsyncSwarmClient(*urls, patience=60) as client:
                        numbers = iter(range(400))

                        async def ask():
                            return [len((await client.classify(file)).blocks) for _ in numbers]

                        async def end():
                            await until(lambda: one.blocks.visits > 150)
                            for connection in list(dying.open.values()):
                                connection.shutdown(socket.SHUT_RDWR)  # as by a kill
                            await first.aclose()

                        _, *answers = await asyncio.gather(end(), *(ask() for _ in range(8)))
            return [n for some in answers for n in some], one.blocks.visits, two.blocks.visits

    blocks, before, after = asyncio.run(go())
    assert blocks == [DEPTH] * 400
    assert before > 150
    assert after > 150


def test_the_client_needs_no_torch():
    code = (
        "import sys, layershuffle.gateway.client.client; "
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


def test_the_key_comes_from_a_file(tmp_path):
    file = written(tmp_path / "key", f"{KEY}\n")
    assert ServerOptions().client_options() == {"api_key": None, "authority": None}
    assert ServerOptions(api_key_file=file).client_options()["api_key"] == KEY
    with pytest.raises(UsageError, match="holds 2 keys"):
        ServerOptions(api_key_file=written(tmp_path / "two", "one\ntwo\n")).client_options()


def test_key_files_that_others_may_read_are_refused(tmp_path):
    assert read_keys(written(tmp_path / "own", "one\ntwo\n")) == ("one", "two")
    for path, words in [
        (written(tmp_path / "group", "one", 0o640), "Other users may read or change"),
        (written(tmp_path / "empty", " \n"), "is empty"),
        (tmp_path / "missing", "There is no file"),
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


@needs_openssl
def test_https_from_the_flags_to_the_answer(papers, tmp_path, capsys):
    """A swarm with certificate and key, asked by both clients and on the command line."""
    keys = str(written(tmp_path / "keys", KEY))
    settings = SwarmSettings(
        hosts=1,
        port=0,
        keys=Path(keys),
        page=False,
        state=str(tmp_path / "s"),
        https_certificate=papers / "cert.pem",
        https_key=papers / "key.pem",
    )

    async def serving(tell):
        def ready(coordinator, url, key):
            assert key
            tell((url, UpCommand(settings=settings).described(coordinator, url, serving=opened)))

        model = ServedModel(asset("digits-onnx"))
        opened = Serving(settings)
        await serve_swarm(opened, model, say=lambda _: None, ready=ready)

    image = tmp_path / "image.png"
    picture().save(image)
    with started(serving) as (url, text):
        assert url.startswith("https://127.0.0.1:")
        assert f"classify IMAGE --address {url} --authority FILE --api-key-file FILE\n" in text
        assert "host-token --ca FILE\n" in text
        with SwarmClient(url, api_key=KEY, authority=papers / "ca.pem") as client:
            assert sorted(client.classify(image).blocks) == [*HOSTED]
            assert client.swarm().audits.disagreed == 0
        assert asyncio.run(asked(url, papers)) == []
        flags = ["--address", url, "--authority", str(papers / "ca.pem"), "--api-key-file", keys]
        # Each image has a request, and so a route, of its own, and may be refused alone.
        among = ["classify", str(image), str(keys), str(image)]
        assert main([*among, *flags]) == 1
        lines, (refused,) = map(str.splitlines, capsys.readouterr())
        assert sum(line.startswith(f"{image}: ") for line in lines) == 2
        assert sum("10 of 10 blocks in" in line for line in lines) == 2
        assert f"error: {keys} was not classified: The image cannot be read. Where: " in refused
        assert main([*among, "none.png", *flags, "--json"]) == 2
        answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert ["top" in answer for answer in answers] == [True, False, True, False]
        images = [str(image), str(keys), str(image), "none.png"]
        assert [answer["image"] for answer in answers] == images
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
        return (await client.swarm()).unreachable_blocks


@needs_openssl
def test_handshakes_that_do_not_come_are_closed(papers):
    """A connection without a handshake is limited like one without a request."""
    # No machine is so slow: the test moves the server's clock beyond it.
    limits = GatewayLimits(head_ms=10_000 * HANGS, client_connections=1)
    tls = server_context(papers / "cert.pem", papers / "key.pem")

    async def serving(tell):
        loop = asyncio.get_running_loop()
        skip = partial(loop.call_soon_threadsafe, loop.skip, 11 * HANGS)
        async with site() as place, listening(place.app, limits=limits, tls=tls) as (listener, _):
            tell((listener.port, skip))
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
            with connection(port) as silent, connection(port) as newer:
                assert silent.recv(1) == b"", "it makes room"
                assert is_open(newer)
                while is_open(newer):
                    skip()
        url = f"https://127.0.0.1:{port}"
        with SwarmClient(url, authority=papers / "ca.pem") as client:
            assert client.swarm().unreachable_blocks == []


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
        (certificate, locked, "cannot be used.+without a password: openssl pkey -in"),
        (papers / "ca.pem", key, "cannot be used"),
        (papers / "missing", key, "cannot be used .No such file"),
        (certificate, papers / "missing", "There is no file"),
        (key, key, "cannot be used"),
    ]:
        with pytest.raises(UsageError, match=phrase):
            server_context(chain, secret)
    for authority in (papers / "missing", written(tmp_path / "no.pem", "no certificate")):
        with pytest.raises(UsageError, match="authority's certificate cannot be read"):
            client_context(authority)
    with pytest.raises(UsageError, match="An authority has no effect on http:"):
        SwarmClient(URL, authority=papers / "ca.pem")


@needs_openssl
def test_other_machines_need_a_key_and_are_warned_of_one_in_clear(papers, tmp_path, caplog):
    keyed = {"keys": written(tmp_path / "keys", KEY)}
    encrypted = {"https_certificate": papers / "cert.pem", "https_key": papers / "key.pem"}

    def warnings(**options):
        caplog.clear()
        opened = Serving(SwarmSettings(state=str(tmp_path / "state"), listen="0.0.0.0", **options))
        opened.operated.close()
        return [record.getMessage() for record in caplog.records]

    (warning,) = warnings(**keyed)
    assert warning.startswith("API keys, images and answers are sent to and from 0.0.0.0 unencr")
    assert warnings(**keyed, **encrypted) == warnings(public=True) == []
    with refuses(UsageError):
        warnings(**encrypted)


def test_who_comes_through_a_proxy_needs_a_key(tmp_path):
    """Unless the operator says that everybody may ask."""
    behind = {"state": str(tmp_path / "state"), "trusted_proxy": ("127.0.0.1",)}
    keyed = Serving(SwarmSettings(**behind, keys=written(tmp_path / "keys", KEY)))
    keyed.operated.close()
    opened = Serving(SwarmSettings(**behind, public=True))
    opened.operated.close()
    with refuses(UsageError):
        Serving(SwarmSettings(**behind))


def test_a_client_without_asyncio_waits_in_a_notebook_and_in_many_threads():
    """There a loop runs already; a client that is closed twice is closed."""
    begun, together = [], threading.Barrier(4)

    async def answer(request):
        begun.append(request)
        await asyncio.to_thread(together.wait, HANGS)
        return answer_of()

    async def notebook():
        with answering(lambda _: answer_of("here")) as client:
            return client.swarm().model

    assert asyncio.run(notebook()) == "here"
    client = answering(answer)
    with client, ThreadPoolExecutor(4) as pool:
        models = [pool.submit(lambda: client.swarm().model) for _ in range(4)]
        assert [model.result(HANGS) for model in models] == ["pico"] * 4
    client.close()
    with pytest.raises(SwarmError, match="The client is closed"):
        client.swarm()
    assert len(begun) == 4


def test_an_expired_certificate_is_named_with_what_to_do():
    def expired(request):
        raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate has expired")

    with answering(expired) as client, pytest.raises(SwarmError, match="has expired") as error:
        client.swarm()
    assert error.value.hint == "renew it, and start the gateway again"
