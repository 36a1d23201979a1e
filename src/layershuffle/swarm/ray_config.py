"""Settings of Ray for a swarm: fast failure detection, a token, fixed ports. Imports no Ray.

They were chosen by measurement. By default Ray takes 14 s to notice that a host was killed and 65 s
to notice that its cable was pulled; with `SYSTEM_CONFIG`, 1 s and 3 s. States above 100 KiB would
go through the object store, which is five times slower between hosts; the inline limits keep them
in the call. Members of a Ray cluster can run code on each other: the token controls every host.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from layershuffle.errors import UsageError
from layershuffle.files import write_bytes

CALL_CONFIG: Mapping[str, int] = {
    "timeout_ms_task_wait_for_death_info": 200,
    "core_worker_internal_heartbeat_ms": 100,
    # Between two hosts a state of 148 KiB took 15.6 ms through the object store, 2.9 ms in the
    # call.
    "max_direct_call_object_size": 4 << 20,
    "task_rpc_inlined_bytes_limit": 64 << 20,
}
"""For every cluster. One machine needs no more: the death of a process is noticed anyway, and fast
health checks would only declare a busy machine, and with it the whole swarm, dead."""

SYSTEM_CONFIG: Mapping[str, int] = {
    **CALL_CONFIG,
    "health_check_initial_delay_ms": 1000,
    # A crash is noticed after about threshold x period, a silence after threshold x (period +
    # timeout).
    "health_check_period_ms": 250,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 4,
}
"""For clusters of several machines. Set only on the head, which passes it to every member."""

LOOPBACK = "127.0.0.1"
# Fixed, because no firewall rule can name ports that Ray draws at random.
HEAD_PORT, HOST_PORT = 6400, 6500
"""First ports of a head and of a host; each uses `PORT_SPAN` ports from there."""
PORT_SPAN = 100
_WORKER_PORTS = 10  # ports of workers begin this far above the first
_CHANNEL_PORT, _CHANNEL_PORTS = 6, 4  # offset and number, on hosts
_CHANNEL_VARIABLE = "LAYERSHUFFLE_CHANNEL_PORT"
_START_HOOK = "layershuffle.swarm.ray_local.only_essentials"
STORE_BYTES = 256 << 20
"""Shared memory of a member; blocks pass through it one at a time when a host loads them."""
_HEADLESS_SECONDS = 7 * 24 * 3600  # Ray turns it into milliseconds of 32 bits
HOST_MARK, NAME_MARK = "block_host", "host:"
"""Ray resources by which the coordinator recognises block hosts, and their names."""
NAMESPACE = "layershuffle-swarm"
# Mode bits by which the group and all others may read, write or enter.
_OTHERS = 0o077


@dataclass(frozen=True)
class Tls:
    """Certificate with the member's addresses, its key, and the authority that signed all."""

    certificate: Path
    key: Path
    authority: Path


def default_token() -> Path:
    """The default path of the token."""
    return Path.home() / ".config" / "layershuffle" / "swarm-token"


def new_token(path: Path) -> None:
    """Write a token of 256 random bits to `path`, readable by this user only.

    Raises `UsageError` if the file exists: members with the old token would be locked out.
    """
    if path.exists():
        raise UsageError("A token exists already", place=path, hint="use it, or remove it first")
    write_bytes(path, secrets.token_hex(32).encode("ascii"), private=True)


def check_token(path: Path) -> None:
    """Raises `UsageError` for a token file that is missing, unreadable, empty or open to others.

    Ray itself would try for 20 seconds before it fails.
    """
    check_secret(path, what="token", hint="copy it from the head (mode 0600), or name its place")


def check_tls(tls: Tls) -> None:
    """Raises `UsageError` if a file is missing or unreadable, or the key open to others."""
    check_secret(tls.key, what="key", hint="name the key that belongs to the certificate")
    for path in (tls.certificate, tls.authority):
        _read(path, what="certificate", hint="give the certificate, the key and the authority")


def check_secret(path: Path, *, what: str, hint: str) -> None:
    """Raises `UsageError` for a file that is missing, unreadable, empty or open to others."""
    content = _read(path, what=what, hint=hint)
    if not content.strip():
        raise UsageError(f"The swarm's {what} file is empty", place=path, hint=hint)
    if path.stat().st_mode & _OTHERS:
        raise UsageError(
            f"Other users may read or change the swarm's {what}",
            place=path,
            hint=f"chmod 600 {path}; if others use this machine, make a new one",
        )


def _read(path: Path, *, what: str, hint: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UsageError(f"The swarm's {what} does not exist", place=path, hint=hint) from error
    except OSError as error:
        raise UsageError(
            f"The swarm's {what} cannot be read ({error.strerror})", place=path, hint=hint
        ) from error


def environment(
    token: Path,
    *,
    tls: Tls | None = None,
    store: Path | None = None,
    threads: int | None = None,
    loopback: bool = False,
    port: int | None = None,
) -> dict[str, str]:
    """Environment variables of every process of a swarm, to be set before Ray is imported.

    `store` (head): a directory in which the head keeps its state for a restart. `loopback`:
    whether Ray listens only on 127.0.0.1. `threads`: torch threads per host (default: the variable
    is unchanged, because the user chooses the threads of a gateway). `port` (host): the first of
    its ports, from which that of the data channel follows (default: any).
    """
    variables = {
        # Explicit, because Ray 2.60 disables authentication on members that find no token.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token.absolute()),
        "RAY_worker_niceness": "0",  # else any other program starves a host
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default Ray ends every process, even the server, without a head for 60 s.
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(_HEADLESS_SECONDS),
        # Else the GCS records every call: 12.5 kB per request, 300 MB in 25,000.
        "RAY_task_events_report_interval_ms": "0",
        # Else Ray replaces 127.0.0.1 by an address that others reach, and listens on all addresses.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0" if loopback else "1",
    }
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    if port is not None:
        variables[_CHANNEL_VARIABLE] = str(port + _CHANNEL_PORT)
    if not loopback:
        variables["RAY_START_HOOK"] = _START_HOOK
    if tls is not None:
        variables |= {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(tls.certificate.absolute()),
            "RAY_TLS_SERVER_KEY": str(tls.key.absolute()),
            "RAY_TLS_CA_CERT": str(tls.authority.absolute()),
        }
    # Measured: a head that was killed and restarted after 3 s found its members and actors, and
    # calls between hosts continued meanwhile.
    if store is not None:
        variables |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(store.absolute())}
    return variables


def channel_ports(variables: Mapping[str, str]) -> tuple[int, ...]:
    """The ports for a host's data channel in an environment of `environment`; (0,) for any."""
    first = variables.get(_CHANNEL_VARIABLE)
    # Several: a process that is ending may still use the first when its successor starts.
    return (0,) if first is None else tuple(range(int(first), int(first) + _CHANNEL_PORTS))


def head_command(directory: Path, *, ip: str, port: int = HEAD_PORT) -> list[str]:
    """The command of a head, which stays in the foreground and holds no blocks.

    `ip`: the address at which the hosts reach it. `directory`: for logs and sockets; its path must
    be short (that of a socket has at most 107 bytes). Raises `UsageError` for a loopback address.
    """
    return [
        *_ray_start(directory, ip, first=port + 1),
        "--head",
        f"--port={port}",
        "--include-dashboard=false",
        "--disable-usage-stats",
        "--no-monitor",  # of cluster autoscaling
        f"--system-config={json.dumps(dict(SYSTEM_CONFIG))}",
    ]


def host_command(
    directory: Path, *, address: str, name: str, ip: str, port: int = HOST_PORT
) -> list[str]:
    """The command of the block host `name`, which joins a head and stays in the foreground.

    `ip` and `directory` as for `head_command`.
    """
    return [
        *_ray_start(directory, ip, first=port),
        f"--address={address}",
        f"--resources={json.dumps(host_resources([name]))}",
    ]


def host_resources(names: Sequence[str]) -> dict[str, float]:
    """Ray resources of a member that runs these block hosts."""
    if not names:
        return {}
    return {HOST_MARK: float(len(names)), **{f"{NAME_MARK}{name}": 1.0 for name in names}}


def host_names(resources: Mapping[str, float]) -> tuple[str, ...]:
    """The block hosts that a member with these resources runs, sorted."""
    marked = {key.removeprefix(NAME_MARK) for key in resources if key.startswith(NAME_MARK)}
    return tuple(sorted(marked - {""}))


def _ray_start(directory: Path, ip: str, *, first: int) -> list[str]:
    if ip == "localhost" or ip.startswith("127."):
        # Ray would silently use another of the machine's addresses.
        raise UsageError(
            f"Other machines cannot reach {ip}",
            hint="name an address of this machine's private network with --ip; for a swarm on this "
            "machine alone: layershuffle swarm up",
        )
    return [
        sys.executable,
        *("-m", "ray.scripts.scripts", "start", "--block"),
        f"--node-ip-address={ip}",
        f"--temp-dir={os.path.abspath(directory)}",
        "--num-cpus=0",  # else Ray starts idle workers in advance, one per core
        "--num-gpus=0",
        f"--object-store-memory={STORE_BYTES}",
        "--include-log-monitor=false",
        f"--node-manager-port={first}",
        f"--object-manager-port={first + 1}",
        f"--runtime-env-agent-port={first + 2}",
        f"--dashboard-agent-grpc-port={first + 3}",
        f"--dashboard-agent-listen-port={first + 4}",
        f"--metrics-export-port={first + 5}",
        f"--min-worker-port={first + _WORKER_PORTS}",
        # The last port of the span in which `first` lies (a head's `first` is its port + 1).
        f"--max-worker-port={first - first % PORT_SPAN + PORT_SPAN - 1}",
    ]
