"""The door for cameras, by the very bytes that components of home automation send."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_site import Site, picture, run

from layershuffle.gateway.http.admission import GatewayLimits
from layershuffle.gateway.http.cameras import form_fields
from layershuffle.gateway.http.requests import Gateway
from pictures import file_of, noise
from waiting import HANGS, until, wait_for, wait_for_address

KEY = "a-key-of-some-length"
MODEL = "runs/mine"  # its name at this door is "mine"


def by_deepstack_python(image: bytes, *, api_key: str, min_confidence: str) -> dict[str, Any]:
    """As `deepstack-python` 0.9 sends it, the library of Home Assistant's component."""
    boundary = "46d5ded9c2ffdaaee03d476a89246eb0"
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="api_key"\r\n\r\n{api_key}\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="min_confidence"\r\n\r\n'
        f"{min_confidence}\r\n"
        f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="image"\r\n\r\n'
    )
    content = head.encode() + image + f"\r\n--{boundary}--\r\n".encode()
    return {
        "content": content,
        "headers": {
            "User-Agent": "python-requests/2.34.2",
            "Accept-Encoding": "gzip, deflate",
            "Accept": "*/*",
            "Content-Type": f"multipart/form-data; boundary={boundary}",
        },
    }


def by_node_red(image: bytes, *, api_key: str, min_confidence: str) -> dict[str, Any]:
    """As `node-red-contrib-deepstack` 0.3.0 sends it: the image first."""
    boundary = "--------------------------cee7e4c5489abbf50c75b29f"
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="image.jpg"\r\n'
        "Content-Type: image/jpeg\r\n\r\n"
    )
    tail = (
        f'\r\n--{boundary}\r\nContent-Disposition: form-data; name="min_confidence"\r\n\r\n'
        f"{min_confidence}\r\n"
        f'--{boundary}\r\nContent-Disposition: form-data; name="api_key"\r\n\r\n{api_key}\r\n'
        f"--{boundary}--\r\n"
    )
    return {
        "content": head.encode() + image + tail.encode(),
        "headers": {
            "user-agent": "got (https://github.com/sindresorhus/got)",
            "content-type": f"multipart/form-data; boundary={boundary}",
            "accept-encoding": "gzip, deflate, br",
        },
    }


SENDERS = pytest.mark.parametrize("send", [by_deepstack_python, by_node_red])


async def posted(site: Site, name: str, request: dict[str, Any]) -> httpx.Response:
    return await site.client.post(f"/v1/vision/custom/{name}", **request)


@SENDERS
def test_labels_are_those_of_the_classification_with_the_whole_image_as_box(send: Any) -> None:
    """Those that are as probable as the form asks, best first; and they count as answers."""
    image = file_of(noise(3, size=(40, 24)), "JPEG")

    async def go(site: Site) -> tuple[Any, httpx.Response, httpx.Response, Any]:
        gateway = site.app.state.gateway
        classifications = []

        async def kept(request: Any, options: Any) -> Any:
            answer, size = await Gateway.classify(gateway, request, options)
            classifications.append(answer)
            return answer, size

        gateway.classify = kept
        answer = await posted(site, "mine", send(image, api_key="", min_confidence="0.1"))
        none = await posted(site, "mine", send(image, api_key="", min_confidence="1"))
        counters = (await site.client.get("/v1/swarm")).json()["counters"]
        return classifications[0], answer, none, counters

    classified, answer, none, counters = run(go, model=MODEL)
    box = {"x_min": 0, "y_min": 0, "x_max": 40, "y_max": 24}
    wanted = []
    for guess in classified.top:
        if guess.probability >= 0.1:
            wanted.append({"label": guess.label, "confidence": guess.probability} | box)
    assert 0 < len(wanted) < len(classified.top)
    assert answer.status_code == 200
    assert answer.json() == {"success": True, "predictions": wanted}
    assert none.json() == {"success": True, "predictions": []}
    assert counters == {"answered": 2}


@SENDERS
def test_the_key_is_that_of_the_form_or_of_the_header(send: Any) -> None:
    image = file_of(picture())

    async def go(site: Site) -> list[int]:
        with_header = send(image, api_key="", min_confidence="0.4")
        with_header["headers"]["Authorization"] = f"Bearer {KEY}"
        requests = [
            send(image, api_key=KEY, min_confidence="0.4"),
            with_header,
            send(image, api_key=f"{KEY}x", min_confidence="0.4"),
            send(image, api_key="", min_confidence="0.4"),
        ]
        return [(await posted(site, "mine", request)).status_code for request in requests]

    assert run(go, model=MODEL, keys=[KEY]) == [200, 200, 401, 401]


def test_the_bounds_are_those_of_every_request() -> None:
    """Of bodies, of images and of places; and a page of another site is refused here as well."""
    limits = GatewayLimits(max_body_bytes=2000, client_requests=1, max_pixels=1000)

    async def go(site: Site) -> list[tuple[int, str]]:
        elsewhere = by_node_red(file_of(noise(0)), api_key="", min_confidence="0.4")
        elsewhere["headers"]["Origin"] = "https://elsewhere.example"
        answers = [
            await posted(site, "mine", by_node_red(image, api_key="", min_confidence="0.4"))
            for image in (bytes(3000), file_of(noise(1, size=(64, 20)), "JPEG", quality=1), b"GIF")
        ]
        answers.append(await posted(site, "mine", elsewhere))
        return [(answer.status_code, answer.json()["error"]["cause"]) for answer in answers]

    too_long, too_many, no_image, other_site = run(go, model=MODEL, limits=limits)
    assert too_long == (413, "The body is larger than 2000 bytes")
    assert too_many[0] == 422
    assert "64x20 pixels" in too_many[1]
    assert no_image == (422, "The image cannot be read")
    assert other_site[0] == 403


def test_the_form_is_out_of_memory_once_its_image_is_decoded() -> None:
    """The image and every other field, which the model does not see."""
    image = file_of(picture()) + bytes(8 << 20)
    request = by_node_red(image, api_key="a" * (4 << 20), min_confidence="0.1")

    async def go(site: Site) -> int:
        gateway = site.app.state.gateway
        genuine = gateway.remote_model.classify

        async def measured(*args: Any, **options: Any) -> Any:
            # The thread that has decoded the image lets go of it a moment later.
            await until(lambda: tracemalloc.get_traced_memory()[0] - before < 2 << 20)
            return await genuine(*args, **options)

        gateway.remote_model.classify = measured
        before, _ = tracemalloc.get_traced_memory()
        return (await posted(site, "mine", request)).status_code

    tracemalloc.start()
    try:
        assert run(go, model=MODEL) == 200
    finally:
        tracemalloc.stop()


def test_wrong_forms_are_refused_with_what_is_right() -> None:
    image = file_of(picture())

    async def go(site: Site) -> tuple[list[tuple[int, str]], Any]:
        plain = {"content": image, "headers": {"Content-Type": "image/png"}}
        requests = [
            ("other", by_node_red(image, api_key="", min_confidence="0.4")),
            ("mine", by_node_red(image, api_key="", min_confidence="NaN")),
            ("mine", by_node_red(image, api_key="", min_confidence="much")),
            ("mine", by_node_red(b"", api_key="", min_confidence="0.4")),
            ("mine", plain),
        ]
        refusals = []
        for name, request in requests:
            answer = await posted(site, name, request)
            refusals.append((answer.status_code, answer.json()["error"]["hint"]))
        return refusals, (await site.client.post("/v1/vision/custom/list")).json()

    refusals, names = run(go, model=MODEL)
    assert [status for status, _ in refusals] == [404, 422, 422, 422, 422]
    assert refusals[0][1] == "its name is mine"
    assert all("min_confidence" in hint and "image" in hint for _, hint in refusals[1:])
    assert names == {"success": True, "models": ["mine"]}


def test_fields_of_a_form_are_read_as_they_were_written() -> None:
    """Also with line ends, dashes and a look-alike of the delimiter in the content."""
    content = b"\r\n\r\n--a\n--ab\r\r\n-\x00\xff"
    kind = 'multipart/form-data; boundary="a b"'
    body = (
        b'ignored\r\n--a b\r\ncontent-disposition: form-data; name="image"\r\n\r\n'
        + content
        + b"\r\n--a b\r\nContent-Disposition: form-data\r\n\r\nnameless"
        + b'\r\n--a b\r\nContent-Disposition: form-data; name="\xc3\xa9"\r\n\r\n\r\n--a b--'
    )
    assert form_fields(body, kind=kind)["image"] == content
    assert form_fields(body, kind="image/png") == {}
    assert form_fields(b"", kind=kind) == {}
    # Nor need names have quotes, and other parameters may come first.
    bare = b"--b\r\ncontent-disposition: form-data; name=image; filename=a.png\r\n\r\nPIX"
    wordy = 'multipart/form-data; charset="utf-8"; boundary=b'
    assert form_fields(bare, kind=wordy) == {"image": b"PIX"}
    # What strangers send before the boundary costs nothing.
    assert form_fields(body, kind=kind.replace(";", f'; x="{60_000 * ";"}";')) == {}
    many = b"\r\n--a b\r\n" + b'Content-Disposition: form-data; name="x"\r\n\r\n' * 1000
    assert len(form_fields(many, kind=kind)) == 1


@contextmanager
def shell(text: str, *, place: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A shell that runs `text` in `place` as a user of its own, and the file of what it prints."""
    log = place / f"log-{len(list(place.glob('log-*')))}"
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(place), "PATH": programs, "OMP_NUM_THREADS": "1"}
    environment.pop("XDG_STATE_HOME", None)
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-ec", text],
            cwd=place,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process, log
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(HANGS)


def test_the_commands_of_the_page_give_its_label(repository: Path, tmp_path: Path) -> None:
    """On one machine: its address stands for that of the page, and `cp` for `scp`."""
    page = (repository / "docs" / "cameras.md").read_text()
    (promised,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    steps = []
    for text in re.findall(r"```\n(.*?)```", page, re.DOTALL)[:3]:
        here = text.replace("192.168.1.5", "127.0.0.1").replace("8000", port)
        steps.append(here.replace("scp 127.0.0.1:", "cp ~/"))
    gateway, host, ask = steps
    (tmp_path / "src").symlink_to(repository / "src")
    with ExitStack() as stack:
        process, log = stack.enter_context(shell(gateway, place=tmp_path))
        wait_for_address(log, process)
        stack.enter_context(shell(host, place=tmp_path))

        def answers() -> list[dict[str, Any]]:
            with shell(ask, place=tmp_path) as (asking, log_of_curl):
                asking.wait(HANGS)
            printed = log_of_curl.read_text()
            found = []
            # No line is between the answers, and curl says before each how far it is.
            while "{" in printed:
                printed = printed[printed.index("{") :]
                answer, end = json.JSONDecoder().raw_decode(printed)
                found.append(answer)
                printed = printed[end:]
            return found

        # Until the host has loaded blocks, answers are refusals or guesses.
        labels, names = wait_for(answers, holds=lambda both: '"42"' in json.dumps(both))
    assert names == {"success": True, "models": ["digits-onnx"]}
    (label,) = labels["predictions"]
    (wanted,) = json.loads(promised)["predictions"]
    assert label.pop("confidence") > 0.4
    del wanted["confidence"]
    assert label == wanted
