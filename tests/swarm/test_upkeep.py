"""A gateway for a month: certificates and keys that change while it serves, files that go away."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import httpx
import pytest
from dial_site import TOKEN, hosting
from gateway_site import certify, run
from starlette.applications import Starlette

from layershuffle.cli import main
from layershuffle.ground.errors import UsageError
from layershuffle.swarm.coordinator import Coordinator
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.served import ServedModel
from layershuffle.swarm.server import operating as upkeep_of
from layershuffle.swarm.server.doors import Https, pinned
from layershuffle.swarm.server.operating import Upkeep
from layershuffle.swarm.server.run import listening
from layershuffle.swarm.service import running_service
from waiting import HANGS, until, wait_for

KEY, OTHER = "a-key-of-some-length", "another-key-of-some-length"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def renew(place, days):
    """A new certificate for the key that is there, which expires in so many days; -1: it has."""
    request = ("req", "-new", "-key", place / "key.pem", "-subj", "/CN=gateway")
    signed = ("x509", "-req", "-in", place / "csr.pem", "-signkey", place / "key.pem")
    for words in (
        (*request, "-out", place / "csr.pem"),
        (*signed, "-days", days, "-out", place / "cert.pem"),
    ):
        subprocess.run(
            ["openssl", *map(str, words)], capture_output=True, check=True, timeout=HANGS
        )


@pytest.fixture
def https(tmp_path):
    certify(tmp_path)
    return Https(tmp_path / "cert.pem", tmp_path / "key.pem")


@needs_openssl
def test_a_certificate_is_read_again_and_a_broken_one_changes_nothing(https, tmp_path, monkeypatch):
    assert https.days == pytest.approx(2, abs=0.01)
    renew(tmp_path, 90)
    assert https.days == pytest.approx(2, abs=0.01), "what is shown counts, not the file"
    https.load()
    assert https.days == pytest.approx(90, abs=0.01)
    before = https.days
    for name, content in [("cert.pem", "no certificate"), ("key.pem", "no key")]:
        kept = (tmp_path / name).read_text()
        (tmp_path / name).write_text(content)
        with pytest.raises(UsageError, match="cannot be used"):
            https.load()
        (tmp_path / name).write_text(kept)
        assert https.days == pytest.approx(before, abs=0.01)
    renew(tmp_path, -1)
    https.load()
    assert https.days == pytest.approx(-1, abs=0.01)


def kept(place, https=None):
    (place / "state").mkdir()
    for name in ("token", "manifest"):
        (place / name).write_text("a token")
    files = {"token_file": place / "token", "model": place / "manifest"}
    return Upkeep(place / "state", **files, https=https)


@needs_openssl
@pytest.mark.parametrize(
    ("days", "words"),
    [(90, ""), (31, ""), (29, "expires in 29 days"), (-1, "has expired: clients cannot connect")],
)
def test_a_certificate_is_said_thirty_days_ahead(https, tmp_path, days, words):
    renew(tmp_path, days)
    https.load()
    upkeep = kept(tmp_path, https)

    async def go(place):
        answers = [await place.client.get(path) for path in ("/healthz", "/metrics")]
        return answers[0], answers[1].text.splitlines()

    health, metrics = run(go, upkeep=upkeep)
    assert health.status_code == 200
    assert words in health.json()["why"]
    assert bool(upkeep.troubles()) is bool(words)
    (line,) = [line for line in metrics if line.startswith("layershuffle_certificate_days ")]
    assert float(line.split()[1]) == pytest.approx(days, abs=0.01)
    assert f"layershuffle_troubles {float(bool(words))}" in metrics


def test_what_goes_away_is_said_and_what_is_back_is_not(tmp_path, monkeypatch):
    upkeep = kept(tmp_path)
    assert upkeep.troubles() == {}
    (tmp_path / "token").rename(tmp_path / "away")
    assert list(upkeep.troubles()) == ["token"]
    shutil.rmtree(tmp_path / "state")
    (tmp_path / "manifest").unlink()
    assert sorted(upkeep.troubles()) == ["model", "state", "token"]
    (tmp_path / "manifest").touch()
    (tmp_path / "away").rename(tmp_path / "token")
    (tmp_path / "state").mkdir()
    assert upkeep.troubles() == {}
    monkeypatch.setattr(upkeep_of, "_LEAST_BYTES", upkeep.free_bytes * 2)
    assert list(upkeep.troubles()) == ["disk"]


def test_a_trouble_is_one_line_in_the_log(tmp_path, caplog, monkeypatch):
    """And a gateway without trouble writes none; a loop that is held up is measured."""
    monkeypatch.setattr(upkeep_of, "_LOOK", 0.01)
    upkeep = kept(tmp_path)

    async def go():
        task = asyncio.create_task(upkeep.run())
        await asyncio.sleep(0.1)
        assert not caplog.records
        (tmp_path / "token").unlink()
        await until(lambda: caplog.records)
        await asyncio.sleep(0.1)
        (tmp_path / "token").write_text("a token")
        await until(lambda: len(caplog.records) > 1)
        time.sleep(0.3)
        await until(lambda: upkeep.lag > 0.2)
        task.cancel()

    asyncio.run(go())
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith(f"The token file {tmp_path / 'token'} is gone: put it back")
    assert second == "There is no trouble with the token any more"


@needs_openssl
def test_sighup_reads_certificate_and_keys_without_a_restart(https, tmp_path):
    """Over a real socket: a connection sees the new certificate, and the old key stops working. A
    key file that is broken changes nothing."""
    del https
    keys, state = tmp_path / "keys", tmp_path / "state"
    keys.touch(mode=0o600)
    keys.write_text(KEY)
    renew(tmp_path, 50)

    def asked(key):
        """The status of an answer, and the days of the certificate that came with it."""
        url = json.loads((state / "operator.json").read_text())["url"]
        headers = {"Authorization": f"Bearer {key}"}
        with (
            httpx.Client(verify=pinned(tmp_path / "cert.pem"), timeout=HANGS) as client,
            client.stream("GET", f"{url}/v1/swarm", headers=headers) as answer,
        ):
            shown = answer.extensions["network_stream"].get_extra_info("ssl_object")
            expires = ssl.cert_time_to_seconds(shown.getpeercert()["notAfter"])
        return answer.status_code, round((expires - time.time()) / 86_400)

    def hung_up(words):
        os.kill(os.getpid(), signal.SIGHUP)
        wait_for(lambda: words in "".join(said))

    def checks():
        try:
            wait_for((state / "operator.json").exists)
            seen.append([asked(KEY), asked(OTHER)])
            renew(tmp_path, 60)
            keys.write_text(OTHER)
            hung_up("Read again: certificate")
            seen.append([asked(OTHER), asked(KEY)])
            keys.write_text("short")
            hung_up("Of API keys those of before stay in use")
            seen.append([asked(OTHER), asked(KEY)])
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    seen, said = [], []
    log = logging.getLogger("layershuffle.swarm.server.start")
    log.addHandler(handler := Saying(said))
    files = ["--https-certificate", tmp_path / "cert.pem", "--https-key", tmp_path / "key.pem"]
    words = ["--hosts", "0", "--port", "0", "--no-page", "--keys", keys, "--state", state, *files]
    try:
        with ThreadPoolExecutor() as pool:
            checked = pool.submit(checks)
            assert main(["swarm", "up", *map(str, words)]) == 0
            checked.result()
    finally:
        log.removeHandler(handler)
    assert seen == [[(200, 50), (401, 50)], [(200, 60), (401, 60)], [(200, 60), (401, 60)]]


class Saying(logging.Handler):
    """Puts the messages of a log into a list."""

    def __init__(self, said):
        super().__init__()
        self.said = said

    def emit(self, record):
        self.said.append(record.getMessage())


SLOW = Limits(hop_floor_ms=5000, hop_cap_ms=10_000, probe_ms=10_000, deadline_ms=25_000)


@asynccontextmanager
async def opened(model: ServedModel) -> AsyncIterator[tuple[Coordinator, str]]:
    """A swarm of `model` without hosts, and the address for them."""
    async with running_service(model, token=TOKEN, limits=SLOW) as (coordinator, _):
        members = coordinator.members
        async with listening(Starlette(routes=members.routes()), members=members) as (way, _):
            yield coordinator, f"ws://127.0.0.1:{way.port}"


def test_blocks_are_tested_and_used_once_files_that_were_removed_are_back(tmp_path, caplog):
    """A host has them on its disk; the gateway says once that it cannot compare."""
    place, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(asset("digits-onnx"), place)
    model = ServedModel(place)
    shutil.copytree(place, cache)
    for digest, path in model.files.items():
        (cache / path.name).rename(cache / digest)

    async def main():
        place.rename(tmp_path / "away")
        async with opened(model) as (coordinator, url), hosting(url, cache=cache, name="a"):
            await until(lambda: caplog.messages)
            await asyncio.sleep(1)  # it is tried again five times
            (tmp_path / "away").rename(place)
            assert not await coordinator.ready(1, within=HANGS)

    asyncio.run(main())
    (said,) = caplog.messages
    assert said.startswith("A block of a host cannot be tested, so it is not used: ")
    assert said.endswith(f"Where: {place / 'block.onnx'}. Next: export the model again.")
