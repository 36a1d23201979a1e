"""A gateway for a month: certificates that expire, keys that change, files that go away."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
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
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.settings import SwarmSettings
from layershuffle.gateway.hosts.coordinator import Coordinator
from layershuffle.gateway.hosts.served_model import ServedModel
from layershuffle.gateway.hosts.service import running_service
from layershuffle.gateway.http import upkeep as upkeep_of
from layershuffle.gateway.http.listening import listening
from layershuffle.gateway.http.secrets import certificate_expiry
from layershuffle.gateway.http.start import Serving
from layershuffle.gateway.http.upkeep import Upkeep
from layershuffle.ground.bundled import asset
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


@needs_openssl
@pytest.mark.parametrize("days", [20_000, 90, -1])
def test_an_expired_certificate_is_said_at_the_start(days, tmp_path, caplog):
    """Its date has two digits for the year until 2049, and four from then on."""
    certify(tmp_path)
    renew(tmp_path, days)
    expires = certificate_expiry(tmp_path / "cert.pem")
    assert expires.timestamp() == pytest.approx(time.time() + 86_400 * days, abs=HANGS)
    certificate = {"https_certificate": tmp_path / "cert.pem", "https_key": tmp_path / "key.pem"}
    Serving(SwarmSettings(state=str(tmp_path / "state"), **certificate)).operated.close()
    messages = [record.getMessage() for record in caplog.records]
    assert [f"{tmp_path / 'cert.pem'} expired on" in message for message in messages] == [True] * (
        days < 0
    )


def kept(place):
    (place / "state").mkdir()
    for name in ("token", "manifest"):
        (place / name).write_text("a token")
    files = {"token_file": place / "token", "model": place / "manifest"}
    return Upkeep(place / "state", **files)


def test_what_goes_away_is_said_and_what_is_back_is_not(tmp_path, monkeypatch):
    upkeep = kept(tmp_path)
    assert upkeep.troubles() == {}
    (tmp_path / "token").rename(tmp_path / "away")
    assert list(upkeep.troubles()) == ["token"]

    async def health(place):
        return (await place.client.get("/healthz")).text

    shown = run(health, upkeep=upkeep)
    assert "the token file is gone" in shown
    assert str(tmp_path) not in shown, "strangers learn no paths"
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
    assert first.startswith("The token file is gone: put it back")
    assert first.endswith(f"Where: {tmp_path / 'token'}")
    assert second == "There is no trouble with the token any more"


def test_sighup_reads_keys_without_a_restart(tmp_path):
    """The old key stops working. A key file that is broken changes nothing."""
    keys, state = tmp_path / "keys", tmp_path / "state"
    keys.touch(mode=0o600)
    keys.write_text(KEY)

    def asked(key):
        """The status of an answer."""
        url = json.loads((state / "operator.json").read_text())["url"]
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{url}/v1/swarm", headers=headers, timeout=HANGS).status_code

    def hung_up(words):
        os.kill(os.getpid(), signal.SIGHUP)
        wait_for(lambda: words in "".join(said))

    def checks():
        try:
            wait_for((state / "operator.json").exists)
            seen.append([asked(KEY), asked(OTHER)])
            keys.write_text(OTHER)
            hung_up("Read again: API keys")
            seen.append([asked(OTHER), asked(KEY)])
            keys.write_text("short")
            hung_up("Of API keys those of before stay in use")
            seen.append([asked(OTHER), asked(KEY)])
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    seen, said = [], []
    log = logging.getLogger("layershuffle.gateway.http.start")
    log.addHandler(handler := Saying(said))
    words = ["--hosts", "0", "--port", "0", "--no-page", "--keys", keys, "--state", state]
    try:
        with ThreadPoolExecutor() as pool:
            checked = pool.submit(checks)
            assert main(["swarm", "up", *map(str, words)]) == 0
            checked.result()
    finally:
        log.removeHandler(handler)
    assert seen == [[200, 401]] * 3


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
        connected = coordinator.connected
        async with listening(Starlette(routes=connected.routes()), connected=connected) as (way, _):
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
