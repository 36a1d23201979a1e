"""How a swarm is served: the settings of `swarm up`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from layershuffle.ground.settings import Above, Port, Positive, Settings

Wire = Literal["fp32", "fp16", "int8"]
DEFAULT_MODEL = "bundled:digits-onnx"


class SwarmSettings(Settings):
    """What is served, from which hosts, and to whom."""

    model: str = DEFAULT_MODEL
    """Model to serve: a directory of `layershuffle export`, or any model, which is exported
    first."""
    hosts: Annotated[int, Field(ge=0)] = 4
    """Hosts to start on this machine; 0 if others dial in."""
    ray: str | None = None
    """Address of a Ray cluster (or auto): a host on each of its nodes, which need layershuffle-host
    and reach --listen. With https they have to trust the certificate as it is."""
    copies: Positive = 2
    """Hosts that hold each block, where they have room."""
    memory_mb: Above = 200.0
    """Megabytes of weights that each host of this machine, or of Ray, takes."""
    token_file: Path | None = None
    """File with what hosts have to know; it is made if it is not there (default: host-token in the
    directory of --state). Two lines while it rotates, the new token first; read again on SIGHUP."""
    wire: Wire = "fp32"
    """Number format of states on the wire."""
    listen: str = "127.0.0.1"
    """Address on which the server listens; addresses that other machines can reach need --keys.
    Without --https-certificate nothing is encrypted on the way there."""
    port: Port = 8000
    """Port of the server; 0 takes a free one."""
    hosts_port: Port | None = None
    """A port for hosts alone, so that clients never hold the places of hosts that dial in (default:
    hosts dial in at --port, where tabs do in any case); 0 takes a free one."""
    https_certificate: Path | None = None
    """Serve https: the server's certificate (PEM), with the names by which clients call it. A
    renewed one counts from the next start; behind a reverse proxy none is needed."""
    https_key: Path | None = None
    """Key of that certificate; only its owner may read it (mode 0600)."""
    keys: Path | None = None
    """File with the API keys of the clients, one per line; only its owner may read it (mode 0600).
    It is read again on SIGHUP."""
    public: bool = False
    """Answer every client that reaches --listen, without a key."""
    state: str | None = None
    """Directory of the operator's key (default: ~/.local/state/layershuffle/swarm)."""
    page: bool = True
    """Show the page at the server's address."""
    min_accuracy: Annotated[float, Field(ge=0, le=100)] | None = None
    """Say at /readyz that the swarm is not ready while its answers are expected to be less accurate
    than this, in percent."""
    trusted_proxy: tuple[str, ...] = ()
    """Addresses or networks of reverse proxies: for requests from there the client is the one that
    X-Forwarded-For names."""
