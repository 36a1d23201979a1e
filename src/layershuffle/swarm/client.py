"""Talk to a swarm's gateway from Python, blocking or not. Needs httpx alone: no torch.

with SwarmClient("http://127.0.0.1:8000") as swarm:
    print(swarm.classify("cat.jpg").images[0].top[0].label)
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm.server.auth import is_loopback
from layershuffle.swarm.server.schemas import Classification, ErrorAnswer, Health, SwarmAnswer
from layershuffle.swarm.server.tls import client_context

if TYPE_CHECKING:
    from PIL.Image import Image

    ImageLike = str | Path | bytes | Image

TIMEOUT = 60.0
"""Seconds that a gateway may stay silent, unless told otherwise; beyond the longest deadline."""
_UNAVAILABLE = 503
_A = TypeVar("_A", bound=BaseModel)


class SwarmError(LayerShuffleError):
    """The gateway refused, could not answer, or cannot be reached.

    `status`: of HTTP, `None` without an answer. `retry_after`: seconds after which it may help to
    ask again, where the gateway says so.
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


class SwarmClient:
    """A gateway at `url`; every method raises `SwarmError`. Close it, or use it in a `with`.

    `authority`: for https, the file of the certificates to trust, and no others (default: those
    that httpx trusts). `timeout` in seconds. `transport` is how requests travel, httpx's own by
    default.
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
        options = _options(url, api_key=api_key, authority=authority, timeout=timeout)
        self._http = httpx.Client(transport=transport, **options)

    def classify(
        self,
        images: ImageLike | Sequence[ImageLike],
        *,
        deadline_ms: float | None = None,
        min_blocks: int | None = None,
        order: str | Sequence[int] | None = None,
        top_k: int | None = None,
    ) -> Classification:
        """The classes of one image or several: paths, bytes of image files, or Pillow images."""
        files = _files(images)
        fields = _fields(deadline_ms, min_blocks, order, top_k)
        return self._ask("POST", "/v1/classify", kind=Classification, files=files, data=fields)

    def swarm(self) -> SwarmAnswer:
        """The hosts as they are now."""
        return self._ask("GET", "/v1/swarm", kind=SwarmAnswer)

    def health(self) -> Health:
        """Whether requests can be answered; an unhealthy swarm is an answer too."""
        return self._ask("GET", "/healthz", kind=Health)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def _ask(self, method: str, path: str, *, kind: type[_A], **content: Any) -> _A:
        try:
            response = self._http.request(method, path, **content)
        except httpx.HTTPError as error:
            raise _unreached(error, self._http.base_url) from error
        return _read(response, kind)


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
        options = _options(url, api_key=api_key, authority=authority, timeout=timeout)
        self._http = httpx.AsyncClient(transport=transport, **options)

    async def classify(
        self,
        images: ImageLike | Sequence[ImageLike],
        *,
        deadline_ms: float | None = None,
        min_blocks: int | None = None,
        order: str | Sequence[int] | None = None,
        top_k: int | None = None,
    ) -> Classification:
        """See `SwarmClient.classify`."""
        files = _files(images)
        fields = _fields(deadline_ms, min_blocks, order, top_k)
        return await self._ask(
            "POST", "/v1/classify", kind=Classification, files=files, data=fields
        )

    async def swarm(self) -> SwarmAnswer:
        """See `SwarmClient.swarm`."""
        return await self._ask("GET", "/v1/swarm", kind=SwarmAnswer)

    async def health(self) -> Health:
        """See `SwarmClient.health`."""
        return await self._ask("GET", "/healthz", kind=Health)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        await self.close()

    async def _ask(self, method: str, path: str, *, kind: type[_A], **content: Any) -> _A:
        try:
            response = await self._http.request(method, path, **content)
        except httpx.HTTPError as error:
            raise _unreached(error, self._http.base_url) from error
        return _read(response, kind)


def _options(
    url: str, *, api_key: str | None, authority: str | Path | None, timeout: float
) -> dict[str, Any]:
    """What both clients tell httpx. Raises `UsageError` for what is not an http address, for a key
    that no header can carry, and for an authority that cannot be read or has nothing to say."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise UsageError(
            f"{url!r} is not the address of a gateway",
            hint="write for example http://127.0.0.1:8000",
        )
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise UsageError("An API key has plain letters, digits and signs alone")
    options: dict[str, Any] = {
        "base_url": url,
        "headers": {} if api_key is None else {"X-API-Key": api_key},
        "timeout": timeout,
        "trust_env": not is_loopback(host),  # no proxy knows the way to this machine
    }
    if authority is not None:
        if parts.scheme != "https":
            raise UsageError(
                f"An authority says nothing about {url}, which is not encrypted",
                hint="write https://..., or leave the authority out",
            )
        options["verify"] = client_context(Path(authority).expanduser())
    return options


def _fields(
    deadline_ms: float | None, min_blocks: int | None, order: str | Sequence[int] | None,
    top_k: int | None,
) -> dict[str, str]:  # fmt: skip
    named = {
        "deadline_ms": deadline_ms,
        "min_blocks": min_blocks,
        "order": order if order is None or isinstance(order, str) else ",".join(map(str, order)),
        "top_k": top_k,
    }
    return {name: str(value) for name, value in named.items() if value is not None}


def _files(images: ImageLike | Sequence[ImageLike]) -> list[tuple[str, tuple[str, bytes]]]:
    several = images if isinstance(images, list | tuple) else [images]
    if not several:
        raise UsageError("There is no image to classify", hint="give one or several")
    return [("image", ("image", _content(one))) for one in several]


def _content(image: Any) -> bytes:
    """The bytes of an image file, as they are; of a Pillow image, as PNG."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        try:
            return Path(image).expanduser().read_bytes()
        except OSError as error:
            raise UsageError(
                f"The image cannot be read ({error.strerror or error})", place=image
            ) from error
    if not hasattr(image, "save"):
        raise UsageError(
            f"A {type(image).__name__} is not an image",
            hint="give a path, the bytes of an image file, or a Pillow image",
        )
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _unreached(error: httpx.HTTPError, url: httpx.URL) -> SwarmError:
    if isinstance(error, httpx.TimeoutException):
        return SwarmError(
            "The gateway did not answer in time", place=str(url), hint="allow a longer timeout"
        )
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return SwarmError(
            f"The gateway's certificate is not trusted ({error})",
            place=str(url),
            hint="name the certificate of its authority (--authority FILE), and the gateway by a "
            "name or address that stands in its certificate",
        )
    return SwarmError(
        f"The gateway cannot be reached ({error or type(error).__name__})",
        place=str(url),
        hint="check the address; layershuffle swarm up starts a gateway on this machine",
    )


def _read(response: httpx.Response, kind: type[_A]) -> _A:
    """The answer in `response`, or the gateway's own error raised."""
    place = str(response.url)
    answers = response.is_success or (kind is Health and response.status_code == _UNAVAILABLE)
    try:
        if answers:
            return kind.model_validate_json(response.content)
        problem = ErrorAnswer.model_validate_json(response.content).error
    except ValidationError as error:
        raise SwarmError(
            f"The answer (HTTP {response.status_code}) is not one of a LayerShuffle gateway",
            place=place,
            hint="check the address",
            status=response.status_code,
        ) from error
    said = problem.cause if problem.id is None else f"{problem.cause} (id {problem.id})"
    raise SwarmError(
        said,
        place=place,
        hint=problem.hint or None,
        status=response.status_code,
        retry_after=_seconds(response.headers),
    )


def _seconds(headers: Mapping[str, str]) -> float | None:
    told = headers.get("retry-after", "")
    return float(told) if told.isascii() and told.isdecimal() else None
