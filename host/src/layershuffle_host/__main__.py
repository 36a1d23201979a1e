"""`layershuffle-host URL...`: lend this machine to a swarm."""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path


def _memory(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 200MB")
    return int(float(match[1]) * 1000 ** ("", "k", "m", "g").index(match[2]))


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text))  # shells leave the tilde of --cache=~/files


def parser() -> argparse.ArgumentParser:
    """The flags of `layershuffle-host`."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:40].lstrip("-._") or "host"
    flags = argparse.ArgumentParser(
        prog="layershuffle-host",
        description="Lend this machine to a swarm: it dials in to gateways, fetches the blocks "
        "that they assign, and serves them until SIGTERM. Nothing listens here.",
    )
    add = flags.add_argument
    add("urls", nargs="+", metavar="URL", help="gateways: ws://HOST:PORT, wss://HOST")
    add("--token-file", required=True, type=_path, metavar="F", help="the token of the swarm")
    add("--name", default=name, help="name in the swarm (default: %(default)s)")
    add("--memory", type=_memory, default="200MB", help="weights to hold (default: %(default)s)")
    add("--threads", type=int, default=1, help="threads of a block (default: %(default)s)")
    add("--cache", type=_path, help="where files stay (default: ~/.cache/layershuffle-host)")
    add("--ca", type=_path, metavar="FILE", help="certificate of a private authority, for wss")
    return flags


def main(words: Sequence[str] | None = None) -> int:
    """Run a host; returns the exit code."""
    flags = parser()
    given = flags.parse_args(words)
    # Before numpy is imported: its own threads would take memory and wait on a busy core.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, str(given.threads))

    import asyncio
    import gc
    import logging
    import signal

    from layershuffle_host.host import Host
    from layershuffle_host.wire import NAME

    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, level=logging.INFO
    )
    logging.getLogger("websockets").setLevel(logging.ERROR)
    if given.threads < 1 or re.fullmatch(NAME, given.name) is None:
        flags.error("--threads is at least 1; --name has up to 40 letters, digits, '.', '_', '-'")

    async def serve() -> None:
        host = Host(
            given.urls,
            # A gateway's file has two lines while its token rotates; the first is the new one.
            token=given.token_file.read_text(encoding="utf-8-sig")
            .strip()
            .partition("\n")[0]
            .strip(),
            name=given.name,
            memory=given.memory,
            threads=given.threads,
            cache=given.cache,
            ca=given.ca,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, host.drain)
        # What was imported stays, so the collector need not look at it.
        gc.collect()
        gc.freeze()
        await host.run()

    try:
        asyncio.run(serve())
    except (OSError, ValueError) as error:
        print(f"layershuffle-host: {error}. Next: layershuffle-host --help", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
