"""Clients of a swarm's gateways, for asyncio and without it. They need httpx, but no torch.

with SwarmClient("http://127.0.0.1:8000") as swarm:
    print(swarm.classify("cat.jpg").top[0].label)
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, Self, TypedDict, TypeVar, Unpack

import httpx
from pydantic import BaseModel, ValidationError

from layershuffle.gateway.http.answers import Classification, ErrorAnswer, SwarmAnswer
from layershuffle.gateway.http.secrets import client_context, is_loopback
from layershuffle.ground.errors import LayerShuffleError, UsageError
from layershuffle.ground.files import user_path

ImageLike = str | Path | bytes
"""The path of an image file, or its bytes."""
_TIMEOUT = 60.0  # seconds that a gateway may stay silent; longer than the longest deadline
_CONNECT = 3.0  # and be gone, before the next one is asked
_PATIENCE = 10.0  # seconds for which a request is repeated that was refused for the moment
_TOO_MANY = 429
_BROKEN = 500  # and above
_A = TypeVar("_A", bound=BaseModel)
_T = TypeVar("_T")


class SwarmError(LayerShuffleError):
    """The gateway refused, could not answer, or cannot be reached.

    `status`: the HTTP status, `None` without an answer of a gateway. `retry_after`: seconds after
    which a retry may help, if the gateway says so.
    """

    def __init__(
        self,
        cause: str,
        *,
        place: str,
        hint: str | None = None,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(cause, place=place, hint=hint)
        self.status = status
        self.retry_after = retry_after


class ClassifyOptions(TypedDict, total=False):
    """Options of a request; the gateway has defaults for all of them."""

    deadline_ms: float | None
    """Milliseconds until the answer must be sent."""
    min_blocks: int | None
    """Fewest blocks of an answer; with fewer the request fails."""
    confidence: float | str | None
    """The chance of being right at which the request ends with fewer blocks; "off" runs all."""
    top: int | None
    """Classes in the answer, at most."""


class ClientOptions(TypedDict, total=False):
    """Options of a client, which `AsyncSwarmClient` explains."""

    api_key: str | None
    authority: str | Path | None
    patience: float
    transport: httpx.AsyncBaseTransport | None


class AsyncSwarmClient:
    """A client of the gateways at `urls`, of which the first that answers is asked.

    Every method raises `SwarmError`. Close the client, or use it in an `async with`. `authority`:
    for https, a file with the only certificates to trust (default: those that httpx trusts).
    `patience`: seconds for which a request is repeated that all gateways refuse for the moment, as
    often as their Retry-After says; 0 for one try at each. `transport`: an httpx transport.

    Raises `UsageError` for an invalid address or proxy, for a key that does not fit into a header
    or comes with a password in the address, and for an authority that cannot be read or has no
    effect.
    """

    def __init__(
        self,
        *urls: str,
        api_key: str | None = None,
        authority: str | Path | None = None,
        patience: float = _PATIENCE,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._gateways = _gateways(urls, api_key=api_key, authority=authority, transport=transport)
        self._patience = patience
        self._first = 0

    async def classify(
        self, image: ImageLike, **options: Unpack[ClassifyOptions]
    ) -> Classification:
        """The classes of an image."""
        return await self._ask(Classification, **_classify_request(image, options))

    async def swarm(self) -> SwarmAnswer:
        """The current state of the swarm."""
        return await self._ask(SwarmAnswer, method="GET", url="/v1/swarm")

    async def close(self) -> None:
        """Close the connections."""
        for gateway in self._gateways:
            await gateway.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _ask(self, kind: type[_A], **request: Any) -> _A:
        turns = _Turns(len(self._gateways), self._first, patience=self._patience)
        while True:
            gateway = self._gateways[turns.gateway]
            try:
                with _swarm_errors(gateway.base_url):
                    answer = _read(await gateway.request(**request), kind)
            except SwarmError as error:
                await asyncio.sleep(turns.pause(error))
            else:
                self._first = turns.gateway
                return answer


class SwarmClient:
    """A client of gateways for programs without asyncio. Close it, or use it in a `with`.

    It has the options and methods of `AsyncSwarmClient`, and every method waits for its answer. Its
    event loop runs in a thread of its own, so it works in a notebook as well, and from several
    threads at once.
    """

    def __init__(self, *urls: str, **options: Unpack[ClientOptions]) -> None:
        self._client = AsyncSwarmClient(*urls, **options)
        self._place = ", ".join(urls)
        self._loop = asyncio.new_event_loop()
        # A daemon, so that a program ends that does not close it.
        self._thread = Thread(target=self._loop.run_forever, name="swarm-client", daemon=True)
        self._thread.start()

    def classify(self, image: ImageLike, **options: Unpack[ClassifyOptions]) -> Classification:
        """The classes of an image."""
        return self._wait(self._client.classify(image, **options))

    def swarm(self) -> SwarmAnswer:
        """The current state of the swarm."""
        return self._wait(self._client.swarm())

    def close(self) -> None:
        """Close the connections, once."""
        if self._loop.is_closed():
            return
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait(self, answer: Coroutine[Any, Any, _T]) -> _T:
        """The result of a coroutine that runs on the loop; Ctrl-C ends it."""
        if self._loop.is_closed():
            answer.close()
            raise SwarmError("The client is closed", place=self._place, hint="make a new one")
        future = asyncio.run_coroutine_threadsafe(answer, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()


class _Turns:
    """Which gateway is asked next, and after what pause, until an answer comes.

    `gateway` is the number of the next one. After a gateway that does not answer, or refuses for
    the moment, the next one is asked at once. When all have been asked, the pause is what one of
    them asks for.
    """

    def __init__(self, gateways: int, first: int, *, patience: float) -> None:
        self._gateways = gateways
        self.gateway = first
        self._end = time.monotonic() + patience
        self._tries = 0
        self._wait = math.inf

    def pause(self, error: SwarmError) -> float:
        """Seconds to wait before the next try. Raises `error` if there is no next try."""
        # A gateway that is broken is like one that is gone; a wrong request is wrong at each.
        if error.status is not None and error.status != _TOO_MANY and error.status < _BROKEN:
            raise error
        self._tries += 1
        self.gateway = (self.gateway + 1) % self._gateways
        self._wait = min(self._wait, math.inf if error.retry_after is None else error.retry_after)
        if self._tries % self._gateways:
            return 0.0
        # Drawn, so that clients which were refused together do not come back together.
        wait = self._wait * random.Random().uniform(1, 1.5)
        self._wait = math.inf
        if time.monotonic() + wait > self._end:
            raise error
        return wait


def _gateways(
    urls: Sequence[str],
    *,
    api_key: str | None,
    authority: str | Path | None,
    transport: httpx.AsyncBaseTransport | None,
) -> list[httpx.AsyncClient]:
    """An httpx client for each address."""
    if not urls:
        raise UsageError("There is no gateway to ask", hint="name its address")
    # A header cannot contain anything else.
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise UsageError(
            "An API key may contain only ASCII letters, digits and signs",
            hint="copy a line of the file that the server got as --keys",
        )
    verify = True if authority is None else client_context(user_path(authority))
    gateways = []
    for url in urls:
        try:
            address = httpx.URL(url)
            usable = address.host and 0 <= (address.port or 0) < 1 << 16
        except (httpx.InvalidURL, UnicodeError):
            usable = False
        if not usable or address.scheme not in ("http", "https"):
            raise UsageError(
                f"{url!r} is not the address of a gateway",
                hint="write for example http://127.0.0.1:8000",
            )
        if api_key is not None and address.userinfo:
            cause = "A password in the address of a gateway takes the place of the API key"
            raise UsageError(cause, hint="give one of the two")
        if authority is not None and address.scheme != "https":
            raise UsageError(
                f"An authority has no effect on {url}, which is not encrypted",
                hint="write https://..., or leave the authority out",
            )
        try:
            gateway = httpx.AsyncClient(
                base_url=url,
                headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
                timeout=httpx.Timeout(_TIMEOUT, connect=_CONNECT),
                # A proxy cannot reach this machine's loopback.
                trust_env=not is_loopback(address.host),
                verify=verify,
                transport=transport,
            )
        except (httpx.InvalidURL, ValueError, ImportError) as error:
            raise UsageError(
                f"The proxy of this environment cannot be used ({error})",
                place="ALL_PROXY, HTTP_PROXY or HTTPS_PROXY",
                hint="name one as http://HOST:PORT, or leave it out (NO_PROXY)",
            ) from error
        gateways.append(gateway)
    return gateways


def _classify_request(image: ImageLike, options: ClassifyOptions) -> dict[str, Any]:
    """The request with the image as its body. Raises `UsageError` if it cannot be read."""
    # Missing options are not sent, so the defaults of the gateway's version hold.
    fields = {name: value for name, value in options.items() if value is not None}
    return {
        "method": "POST",
        "url": "/v1/classify",
        "params": fields,
        "content": _content(image),
        "headers": {"Content-Type": "application/octet-stream"},
    }


def _content(image: ImageLike) -> bytes:
    # Not decoded here: the gateway must get exactly the pixels of the file.
    if isinstance(image, bytes):
        return image
    try:
        return user_path(image).read_bytes()
    except OSError as error:
        raise UsageError(
            f"The image cannot be read ({error.strerror or error})",
            place=image,
            hint="name the file of an image",
        ) from error


@contextmanager
def _swarm_errors(url: httpx.URL) -> Iterator[None]:
    """Raise the errors of httpx as `SwarmError`."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise SwarmError(
            "The gateway did not answer in time", place=str(url), hint="try again later"
        ) from error
    except (httpx.HTTPError, UnicodeError) as error:  # a name with an empty label, or a long one
        cause = f"The gateway cannot be reached ({error or type(error).__name__})"
        hint = "check the address; layershuffle swarm up starts a gateway on this machine"
        if "certificate has expired" in str(error):
            cause = "The gateway's certificate has expired"
            hint = "renew it, and start the gateway again"
        elif "CERTIFICATE_VERIFY_FAILED" in str(error):
            cause = f"The gateway's certificate is not trusted ({error})"
            hint = (
                "name the certificate of its authority (--authority FILE), and the gateway by a "
                "name or address in its certificate"
            )
        raise SwarmError(cause, place=str(url), hint=hint) from error


def _read(response: httpx.Response, kind: type[_A]) -> _A:
    """The answer in `response`. Raises the gateway's error as `SwarmError`."""
    place = str(response.url)
    try:
        if response.is_success:
            return kind.model_validate_json(response.content)
        # Errors of a proxy, in HTML, are not shown as the gateway's.
        problem = ErrorAnswer.model_validate_json(response.content).error
    except ValidationError as error:
        raise SwarmError(
            f"The answer (HTTP {response.status_code}) is not one of a LayerShuffle gateway",
            place=place,
            hint="check the address",
            # A proxy without its gateway, or a server that ends: another gateway may answer.
            status=None if response.is_server_error else response.status_code,
        ) from error
    # HTTP also allows a date here, which our gateway never sends.
    seconds = response.headers.get("retry-after", "")
    raise SwarmError(
        problem.cause if problem.id is None else f"{problem.cause} (id {problem.id})",
        place=place,
        hint=problem.hint or None,
        status=response.status_code,
        retry_after=float(seconds) if seconds.isascii() and seconds.isdecimal() else None,
    )
