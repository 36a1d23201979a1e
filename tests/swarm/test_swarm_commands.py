"""`layershuffle swarm ...` and `classify`, and the operator's endpoint."""

import asyncio
import gc
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from contextvars import ContextVar
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from layershuffle.cli import main
from layershuffle.cli.asking import describe_answer
from layershuffle.gateway.brain.settings import SwarmSettings
from layershuffle.gateway.calibration.calibration import Expected
from layershuffle.gateway.hosts.served_model import ServedModel
from layershuffle.gateway.http import start
from layershuffle.gateway.http.answers import Classification, Guess, Times
from layershuffle.gateway.http.operator import Operator, find_operator, published, state_directory
from layershuffle.gateway.http.start import Serving, serve_swarm
from layershuffle.ground.bundled import asset
from layershuffle.ground.errors import LayerShuffleError, UsageError
from layershuffle.models.manifest import read_manifest
from refusals import refuses
from waiting import HANGS, wait_for


def test_the_expected_accuracy_is_that_of_images_like_the_calibrations():
    """The accuracy on other photographs was not measured."""
    answer = Classification(
        top=[Guess(label="cat", index=0, probability=0.9)],
        depth=2, blocks=[1, 0], versions=[0, 1], skipped=[], degraded=False, ending="complete",
        route=[],
        expected=Expected(
            top1=95.04, low=94.1, high=95.96, orders_low=93.0, orders_high=97.0, kept=2, orders=20,
            images=2000, data="digit-pairs", split="test",
        ),
        ms=Times(total=5.0, stem=1.0, swarm=3.0, head=1.0),
    )  # fmt: skip
    assert describe_answer(answer, Path("a.png")).splitlines()[-1] == (
        "On images like digit-pairs, 95.0 % of answers with 2 blocks in any order are correct "
        "(94.1 to 96.0 over 2,000 images); nine of ten orders lie between 93.0 and 97.0 %. Of "
        "other images nothing is known."
    )
    for sure, words in [
        (True, "answers that ended at a chance of 97 % are"),
        (False, "answers with 2 blocks in any order that never reached a chance of 97 % are"),
    ]:
        kind = answer.expected.model_copy(update={"sure": sure, "confidence": 0.97})
        told = describe_answer(answer.model_copy(update={"expected": kind}), Path("a.png"))
        assert f"95.0 % of {words} correct (94.1 to" in told
    ran = describe_answer(answer, Path("a.png")).splitlines()[1]
    assert ran == "2 of 2 blocks in 5 ms: "
    older = answer.model_copy(update={"blocks": [1, 0, 0], "versions": [0, 0, 1]})
    ran = describe_answer(older, Path("a.png")).splitlines()[1]
    assert ran.endswith("as 1,0@0,0@1 (block@number of the steps whose state it read): ")


def run(capsys, *words):
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("words", "code", "phrase"),
    [
        (["swarm", "status", "--address", "http://127.0.0.1:9"], 1, "cannot be reached"),
        (["classify", "x.png", "--address", "http://127.0.0.1:9"], 2, "x.png"),
        (["swarm", "up", "--model", "dir:/nowhere"], 1, "no such directory"),
        (["swarm", "up", "--hosts", "-3"], 2, "hosts: Input should be greater than or equal to 0"),
        (["swarm", "up", "--copies", "0"], 2, "copies: Input should be greater than or equal to 1"),
        (["swarm", "up", "--memory-mb", "nan"], 2, "memory_mb: Input should be a finite number"),
        (["swarm", "up", "--https-key", "k"], 2, "a certificate and its key"),
        (["swarm", "up", "--listen", "0.0.0.0"], 2, "without an API key"),
        (["swarm", "up", "--listen", "[::]", "--public", "--ray", "auto"], 2, "cannot dial to"),
        (["swarm", "calibrate", "timm:vit_tiny_patch16_224?pretrained=false"], 2, "no directory"),
    ],
)
def test_errors_are_one_paragraph(capsys, monkeypatch, tmp_path, words, code, phrase):
    monkeypatch.setenv("HOME", str(tmp_path))
    with tempfile.TemporaryDirectory(prefix="ls-") as short:  # a socket's path is
        monkeypatch.setenv("XDG_STATE_HOME", short)
        status, out, err = run(capsys, *words)
    # What takes seconds is said before.
    assert (status, re.sub(r"  \d\.\d s  Exporting .*\n", "", out)) == (code, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert " Next: " in err
    assert phrase in err


def test_operator_commands_without_a_swarm(capsys, tmp_path):
    (tmp_path / "state").mkdir(mode=0o700)
    for words in (["drain", "a"], ["readmit", "a"]):
        code, _, err = run(capsys, "swarm", *words, "--state", str(tmp_path / "state"))
        assert code == 2
        assert "No swarm of this user runs on this machine" in err


def test_a_port_in_use_is_told_before_anything_is_started(capsys, tmp_path):
    (tmp_path / "state").mkdir(mode=0o700)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["swarm", "up", "--port", port, "--state", str(tmp_path / "state")]
        code, out, err = run(capsys, *words)
    assert (code, out) == (1, "")
    assert f"cannot listen on 127.0.0.1:{port}" in err
    assert "Next: end what listens there, or name another --port" in err


def test_a_gateway_starts_without_torch():
    """Importing it takes seconds, and 300 MB."""
    code = "import layershuffle.cli.serving, layershuffle.gateway.http.start, sys; "
    words = [sys.executable, "-c", f"{code}print('torch' in sys.modules)"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_model_in_torch_is_exported_by_another_process(tmp_path):
    code = (
        "from layershuffle.gateway.hosts.served_model import served_directory; import sys; "
        "print(served_directory('bundled:digits'), 'torch' in sys.modules)\n"
        "served_directory('dir:/nothing/here')"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    place, in_this_process = done.stdout.split()
    assert in_this_process == "False"
    assert len(read_manifest(Path(place)).blocks) == 12
    last = done.stderr.splitlines()[-1]
    assert "dir:/nothing/here cannot be exported: There is no such directory" in last


# --- the operator's endpoint ----------------------------------------------------------------------


def test_directories_that_others_may_enter_are_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(UsageError, match="Other users may enter"):
        state_directory(str(tmp_path / "open"))
    assert state_directory(str(tmp_path / "new")).stat().st_mode & 0o777 == 0o700


# The event loop of the swarm, for work that runs in a thread beside it.
LOOP = ContextVar("LOOP")


def served(tmp_path, work, *, keys=None):
    """`work(operator, coordinator)` in a thread, beside a swarm that an operator can reach."""

    async def go():
        LOOP.set(asyncio.get_running_loop())
        state = str(tmp_path / "s")
        model, opened = ServedModel(asset("digits-onnx")), LOOP.get().create_future()
        settings = SwarmSettings(
            state=state, token_file=tmp_path / "token", hosts=2, port=0, page=False, keys=keys
        )
        told = {"say": lambda _: None, "ready": lambda *facts: opened.set_result(facts)}
        task = asyncio.create_task(serve_swarm(Serving(settings), model, **told))
        gc.unfreeze()
        coordinator, *_ = await opened
        assert gc.get_freeze_count() > 0, "a full collection would hold the gateway up"
        operator = find_operator(state)
        try:
            await asyncio.to_thread(work, operator, coordinator)
            with pytest.raises(UsageError, match="runs already"):
                Serving(settings)
        finally:
            operator.close()
            task.cancel()
            await asyncio.wait({task})

    asyncio.run(go())
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["lock"]
    with pytest.raises(UsageError, match="No swarm of this user runs"):
        find_operator(str(tmp_path / "s"))


class BadGateway(BaseHTTPRequestHandler):
    """As of a proxy whose gateway is gone."""

    def do_POST(self):
        self.send_response(502)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_):
        pass


def test_the_operator_says_what_is_no_gateway():
    with refuses(UsageError, "--address"):
        Operator("http://[::1", key="k")
    with HTTPServer(("127.0.0.1", 0), BadGateway) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        answering = threading.Thread(target=server.handle_request)
        answering.start()
        with closing(Operator(url, key="k")) as operator, refuses(LayerShuffleError, url):
            operator.command("drain", host="a")
        answering.join()


def url_of(operator):
    """The address of the operator's gateway, with a slash at its end."""
    return f"{operator.url}/"


def condition_until(coordinator, host, wanted):
    wait_for(lambda: coordinator.router.swarm[host].condition, holds=lambda now: now == wanted)


def test_the_operator_commands_the_swarm(tmp_path, capsys):
    """A second swarm is refused before its model is loaded."""

    def work(operator, coordinator):
        up = ["swarm", "up", "--model", "dir:/nowhere", "--state", str(tmp_path / "s")]
        code, _, err = run(capsys, *up)
        assert (code, "A swarm of this user runs already" in err) == (2, True)
        assert operator.command("drain", host="host-1") == {"empty": True}
        assert coordinator.router.swarm["host-1"].condition == "draining"
        operator.command("readmit", host="host-1")
        condition_until(coordinator, "host-1", "healthy")
        with pytest.raises(UsageError, match="Host host-1 is healthy, so it was not restarted"):
            operator.command("readmit", host="host-1")
        # A cleaner of old files: the hosts of this machine come back, and it is said.
        (tmp_path / "token").unlink()
        why = httpx.get(f"{url_of(operator)}healthz").json()["why"]
        assert "the token file is gone" in why
        operator.command("kill", host="host-2")
        condition_until(coordinator, "host-2", "gone")
        operator.command("readmit", host="host-2")
        condition_until(coordinator, "host-2", "healthy")
        with pytest.raises(UsageError, match="no host 'z'"):
            operator.command("drain", host="z")
        with pytest.raises(UsageError, match="no host 'z'"):
            operator.command("readmit", host="z")
        with pytest.raises(UsageError, match="did not start a host 'z'"):
            operator.command("kill", host="z")
        odd = {"host": "host-1", "fast": True}
        answer = operator._http.post("/operator/drain", json=odd)
        assert (answer.status_code, "/operator/drain" in answer.text) == (422, True)
        answer = operator._http.post("/operator/foo", json={"host": "host-1"})
        assert (answer.status_code, "no command 'foo'" in answer.text) == (422, True)
        operator.command("kill", host="host-1")
        wait_for(lambda: "host-1" not in coordinator.children.pids)
        with pytest.raises(LayerShuffleError, match="The process of host-1 has ended"):
            operator.command("kill", host="host-1")
        readmit = ["swarm", "readmit", "host-1", "--address", operator.url]
        assert run(capsys, *readmit, "--state", str(tmp_path / "s"))[0] == 0
        condition_until(coordinator, "host-1", "healthy")
        port = operator.url.rpartition(":")[2]
        for other in ("http://192.0.2.1:8000", f"http://192.0.2.1:{port}", "http://[::1"):
            with refuses(UsageError, "--address"):
                find_operator(str(tmp_path / "s"), address=other)
        with closing(find_operator(str(tmp_path / "s"), address=f"http://localhost:{port}/")):
            pass
        for broken in (f"127.0.0.1:{port}", "gateway", "http://", "http://[::1"):
            with refuses(UsageError, "--address"):
                Operator(broken, key="a-key-of-some-length")
        key = tmp_path / "operator-key"
        key.touch(mode=0o600)
        key.write_text("another-key-of-some-length")
        drain = ["swarm", "drain", "host-1", "--address", operator.url]
        code, _, err = run(capsys, *drain, "--operator-key-file", str(key))
        assert (code, "The operator's key is missing or wrong" in err) == (1, True)
        key.write_text(published(str(tmp_path / "s"))["key"])
        code, out, _ = run(capsys, *drain, "--operator-key-file", str(key))
        assert code == 0
        again = f"readmit host-1 --address {operator.url} --operator-key-file {key}, or"
        assert again in out

    served(tmp_path, work)


def test_blocks_that_no_host_holds_are_said_at_the_start(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(start, "_PATIENCE", 0.0)  # long before a host is up
    served(tmp_path, lambda *_: None)
    assert "No host of this machine holds the blocks 1, 2, 3" in caplog.text


@pytest.mark.parametrize("work", ["Upkeep.run", "Children.run", "hosts_on_ray"])
def test_what_breaks_beside_a_swarm_ends_it_with_its_sentence(tmp_path, monkeypatch, work):
    async def broken(*_, **how):
        await asyncio.sleep(0.1)
        raise UsageError("it broke")

    monkeypatch.setattr(f"layershuffle.gateway.http.start.{work}", broken)
    ray = "auto" if work == "hosts_on_ray" else None
    settings = SwarmSettings(state=str(tmp_path / "s"), hosts=0, port=0, page=False, ray=ray)
    model, told = ServedModel(asset("digits-onnx")), {"say": print, "ready": print}
    with pytest.raises(UsageError, match="it broke"):
        asyncio.run(asyncio.wait_for(serve_swarm(Serving(settings), model, **told), HANGS))


def test_nobody_without_the_key_is_an_operator(tmp_path):
    """Neither by the key of the API nor from this machine, whatever the header `Host` says."""

    def work(operator, coordinator):
        url = url_of(operator)
        for headers in (
            {}, {"Authorization": f"Bearer {'x' * 32}"}, {"Authorization": f"Bearer {'k' * 16}"},
            {"Host": "127.0.0.1"}, {"Origin": url, "Sec-Fetch-Site": "same-origin"},
        ):  # fmt: skip
            answer = httpx.post(f"{url}operator/kill", headers=headers, json={"host": "host-1"})
            assert answer.status_code == 401
            assert "operator's key" in answer.json()["error"]["cause"]
        assert "operator" not in httpx.get(f"{url}openapi.json").text
        assert all(host.condition == "healthy" for host in coordinator.router.swarm.values())

    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text("k" * 16)
    served(tmp_path, work, keys=keys)
