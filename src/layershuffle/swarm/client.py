"""Clients of a swarm's gateway, blocking and for asyncio. They need httpx, but no torch.

with SwarmClient("http://127.0.0.1:8000") as swarm:
    print(swarm.classify("cat.jpg").images[0].top[0].label)
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm.server.schemas import (
    IMAGE_FIELD,
    Classification,
    ErrorAnswer,
    Health,
    SwarmAnswer,
)
from layershuffle.swarm.server.tls import client_context, is_loopback

if TYPE_CHECKING:
    from PIL.Image import Image

    ImageLike = str | Path | bytes | Image

TIMEOUT = 60.0
"""Default seconds that a gateway may stay silent; longer than the longest deadline."""
_UNAVAILABLE = 503
_A = TypeVar("_A", bound=BaseModel)


class SwarmError(LayerShuffleError):
    """The gateway refused, could not answer, or cannot be reached.

    `status`: the HTTP status, `None` without an answer. `retry_after`: seconds after which a retry
    may help, if the gateway says so.
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
        self.status, self.retry_after = status, retry_after


class ClassifyOptions(TypedDict, total=False):
    """Options of a request; the gateway has defaults for all of them."""

    deadline_ms: float | None
    """Milliseconds until the answer must be sent."""
    min_blocks: int | None
    """Fewest blocks of an answer; with fewer the request fails."""
    top_k: int | None
    """Classes in the answer, at most."""


class SwarmClient:
    """A gateway at `url`; every method raises `SwarmError`. Close it, or use it in a `with`.

    `authority`: for https, a file with the only certificates to trust (default: those that httpx
    trusts). `timeout` in seconds. `transport`: an httpx transport. Raises `UsageError` for an
    invalid address, for a key that does not fit into a header, and for an authority that cannot be
    read or has no effect.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        authority: str | Path | None = None,
        timeout: float = TIMEOUT,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        settings = _settings(url, api_key=api_key, authority=authority, timeout=timeout)
        self._http = httpx.Client(transport=transport, **settings)

    def classify(
        self, images: ImageLike | Sequence[ImageLike], **options: Unpack[ClassifyOptions]
    ) -> Classification:
        """The classes of one or several images: paths, bytes of image files, or Pillow images."""
        request = _classify_request(self._http, images, options=options)
        return self._send(request, Classification)

    def swarm(self) -> SwarmAnswer:
        """The current state of the swarm."""
        return self._send(self._http.build_request("GET", "/v1/swarm"), SwarmAnswer)

    def health(self) -> Health:
        """Whether requests can be answered; an unhealthy swarm raises no error."""
        return self._send(self._http.build_request("GET", "/healthz"), Health)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, request: httpx.Request, kind: type[_A]) -> _A:
        with _swarm_errors(self._http.base_url):
            return _read(self._http.send(request), kind)


class AsyncSwarmClient:
    """`SwarmClient` for asyncio: the same methods, awaited; `async with` closes it."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        authority: str | Path | None = None,
        timeout: float = TIMEOUT,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        settings = _settings(url, api_key=api_key, authority=authority, timeout=timeout)
        self._http = httpx.AsyncClient(transport=transport, **settings)

    async def classify(
        self, images: ImageLike | Sequence[ImageLike], **options: Unpack[ClassifyOptions]
    ) -> Classification:
        """See `SwarmClient.classify`."""
        request = _classify_request(self._http, images, options=options)
        return await self._send(request, Classification)

    async def swarm(self) -> SwarmAnswer:
        """See `SwarmClient.swarm`."""
        return await self._send(self._http.build_request("GET", "/v1/swarm"), SwarmAnswer)

    async def health(self) -> Health:
        """See `SwarmClient.health`."""
        return await self._send(self._http.build_request("GET", "/healthz"), Health)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _send(self, request: httpx.Request, kind: type[_A]) -> _A:
        with _swarm_errors(self._http.base_url):
            return _read(await self._http.send(request), kind)


def _settings(
    url: str, *, api_key: str | None, authority: str | Path | None, timeout: float
) -> dict[str, Any]:
    """The arguments of both clients' httpx client."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    # Raised for an invalid IPv6 address, as one without its closing bracket.
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise UsageError(
            f"{url!r} is not the address of a gateway",
            hint="write for example http://127.0.0.1:8000",
        )
    # A header cannot contain anything else.
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise UsageError(
            "An API key may contain only ASCII letters, digits and signs",
            hint="copy a line of the file that the server got as --keys",
        )
    settings: dict[str, Any] = {
        "base_url": url,
        "headers": {} if api_key is None else {"X-API-Key": api_key},
        "timeout": timeout,
        "trust_env": not is_loopback(host),  # a proxy cannot reach this machine's loopback
    }
    if authority is not None:
        if parts.scheme != "https":
            raise UsageError(
                f"An authority has no effect on {url}, which is not encrypted",
                hint="write https://..., or leave the authority out",
            )
        settings["verify"] = client_context(Path(authority).expanduser())
    return settings


def _classify_request(
    http: httpx.Client | httpx.AsyncClient,
    images: ImageLike | Sequence[ImageLike],
    *,
    options: ClassifyOptions,
) -> httpx.Request:
    """The request with images and options as a form. Raises `UsageError` for invalid images."""
    several = images if isinstance(images, list | tuple) else [images]
    if not several:
        raise UsageError("There is no image to classify", hint="give one or several")
    # Missing options are not sent, so the defaults of the gateway's version hold.
    fields = {name: value for name, value in options.items() if value is not None}
    # A part is a file only if it has a file name; the gateway ignores the name.
    return http.build_request(
        "POST",
        "/v1/classify",
        files=[(IMAGE_FIELD, (IMAGE_FIELD, _content(image))) for image in several],
        data={name: str(value) for name, value in fields.items()},
    )


def _content(image: Any) -> bytes:
    """The unchanged bytes of an image file, or a Pillow image as PNG."""
    # Not decoded here: the gateway must get exactly the pixels of the file.
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        try:
            return Path(image).expanduser().read_bytes()
        except OSError as error:
            raise UsageError(
                f"The image cannot be read ({error.strerror or error})",
                place=image,
                hint="name the file of an image",
            ) from error
    # No `isinstance`, because only users of Pillow images need Pillow.
    if not hasattr(image, "save"):
        raise UsageError(
            f"A {type(image).__name__} is not an image",
            hint="give a path, the bytes of an image file, or a Pillow image",
        )
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")  # lossless
    return buffer.getvalue()


@contextmanager
def _swarm_errors(url: httpx.URL) -> Iterator[None]:
    """Raise the errors of httpx as `SwarmError`."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise SwarmError(
            "The gateway did not answer in time", place=str(url), hint="allow a longer timeout"
        ) from error
    except httpx.HTTPError as error:
        cause = f"The gateway cannot be reached ({error or type(error).__name__})"
        hint = "check the address; layershuffle swarm up starts a gateway on this machine"
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            cause = f"The gateway's certificate is not trusted ({error})"
            hint = (
                "name the certificate of its authority (--authority FILE), and the gateway by a "
                "name or address in its certificate"
            )
        raise SwarmError(cause, place=str(url), hint=hint) from error


def _read(response: httpx.Response, kind: type[_A]) -> _A:
    """The answer in `response`. Raises the gateway's error as `SwarmError`."""
    place = str(response.url)
    # /healthz answers 503 with the same body when no block can be run.
    answers = response.is_success or (kind is Health and response.status_code == _UNAVAILABLE)
    try:
        if answers:
            return kind.model_validate_json(response.content)
        # Errors of a proxy, in HTML, are not shown as the gateway's.
        problem = ErrorAnswer.model_validate_json(response.content).error
    except ValidationError as error:
        raise SwarmError(
            f"The answer (HTTP {response.status_code}) is not one of a LayerShuffle gateway",
            place=place,
            hint="check the address",
            status=response.status_code,
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
