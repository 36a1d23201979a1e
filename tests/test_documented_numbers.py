"""Every limit that a page states is that of the code: seconds, bytes and counts.

Tables and what was measured come from files (`scripts/tables.py`); these are written by hand.
"""

import re
from pathlib import Path

import pytest

from layershuffle.data.digits import PAIRS
from layershuffle.export import folder
from layershuffle.export.folder import PARITY
from layershuffle.export.graphs import OPSET
from layershuffle.gateway.brain import sureness
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.settings import SwarmSettings
from layershuffle.gateway.hosts import connections, coordinator
from layershuffle.gateway.http import cameras, upkeep
from layershuffle.gateway.http.admission import GatewayLimits
from layershuffle.gateway.http.requests import Options
from layershuffle.ground.bundled import asset
from layershuffle.images import pixels
from layershuffle.training.settings import FitSettings
from layershuffle_host import host, wire

HOSTS = Limits()
CLIENTS = GatewayLimits()
TAB = re.search(r"^const SILENT = (\S+);", asset("join", "worker.js").read_text(), re.MULTILINE)
WORDS = {"half a second": "0.5", "five": "5", "one": "1"}

# The page, its words with the number in brackets, and the number in the page's unit.
NUMBERS = [
    ("cameras", r"of the (five) most probable", Options.model_validate({}).top),
    ("cameras", r"Default: ([\d.]+) \|", cameras.MIN_CONFIDENCE),
    ("commands", r"is scored on the \*holdout\*: (\d+) %",
     FitSettings.model_fields["holdout"].default * 100),
    ("deploy", r"disk with less than (\d+) MB", upkeep._LEAST_BYTES / 1e6),
    ("deploy", r"one address may do: (\d+) connections", CLIENTS.client_connections),
    ("deploy", r"(\d+) requests under way", CLIENTS.client_requests),
    ("deploy", r"(\d+) seconds until a request has arrived", CLIENTS.head_ms / 1000),
    ("host-protocol", r"frames of at most (\d+) MiB", wire.MAX_FRAME_BYTES / 2**20),
    ("host-protocol", r"text of at most (\d+) MiB", wire.MAX_TEXT_BYTES / 2**20),
    ("host-protocol", r"a host pings every (\d+) s", wire.PING_SECONDS),
    ("host-protocol", r"sends more than (\d+) pings", connections._MOST_EMPTY),
    ("host-protocol", r"empty fragments in (\d+) s", wire.PING_SECONDS),
    ("host-protocol", r"has not answered for (\d+) s", wire.PONG_SECONDS),
    ("host-protocol", r"dials again after (\d+) s without a frame", int(TAB[1]) / 1000),
    ("host-protocol", r"after a random time of ([\d.]+) to", host._FIRST_DELAY / 2),
    ("host-protocol", r"a random time of [\d.]+ to ([\d.]+) s", host._FIRST_DELAY),
    ("host-protocol", r"doubles up to ([\d.]+) to", host._LONGEST_DELAY / 2),
    ("host-protocol", r"doubles up to [\d.]+ to ([\d.]+) s", host._LONGEST_DELAY),
    ("host-protocol", r"`hello` \| host, first, within (\d+) s", connections.HELLO_SECONDS),
    ("host-protocol", r"A header of (\d+) bytes", wire.HEADER.size),
    ("host-protocol", r"images \| 1 to (\d+)", wire.MAX_IMAGES),
    ("onnx", r"opset \((\d+)\)", OPSET),
    ("onnx", r"largest error is at most (\S+) of its largest number", PARITY),
    ("onnx", r"it costs at most (one) point,", folder._MOST_LOST),
    ("pis", r"lends (\d+) MB \(`--memory`\)", SwarmSettings().memory_mb),
    ("specs", r"([\d,]+) / [\d,]+ / [\d,]+ pairs", PAIRS["train"]),
    ("specs", r"[\d,]+ / ([\d,]+) / [\d,]+ pairs", PAIRS["validation"]),
    ("specs", r"[\d,]+ / [\d,]+ / ([\d,]+) pairs", PAIRS["test"]),
    ("swarm", r"a host that is away for ([\d.]+) s", coordinator._GRACE),
    ("swarm", r"its blocks to others after ([\d.]+) s", coordinator._GRACE),
    ("swarm", r"lost at most ([\d.]+) points when it was measured", sureness.LOSS),
    ("swarm", r"until its next test, (half a second) at most", HOSTS.probe_ms / 1000),
    ("swarm", r"no visits for a while, (\d+) s at most", HOSTS.suspect_max_ms / 1000),
    ("swarm", r"loads nothing for (\d+) s", HOSTS.load_ms / 1000),
    ("swarm", r"time of a block at (\d+) kB/s", HOSTS.load_bytes_per_second / 1000),
    ("swarm", r"(\d+) MB a request", CLIENTS.max_body_bytes / 1e6),
    ("swarm", r"of (\d+) million pixels", CLIENTS.max_pixels / 1e6),
    ("swarm", r"pixels, ([\d,]+) a side", pixels.MOST_SIDE),
    ("swarm", r"a side and (\d+) MB in memory", pixels.MOST_BYTES / 1e6),
    ("swarm", r"deadlines of (\d+) ms", CLIENTS.min_deadline_ms),
    ("swarm", r"deadlines of \d+ ms to (\d+) s", HOSTS.max_deadline_ms / 1000),
    ("swarm", r"computes (\d+) % of the visits again", HOSTS.audit_share * 100),
]  # fmt: skip


@pytest.mark.parametrize(("page", "words", "wanted"), NUMBERS, ids=[row[1] for row in NUMBERS])
def test_a_number_of_a_page_is_that_of_the_code(
    repository: Path, page: str, words: str, wanted: float
) -> None:
    """Within 5 %, because a page writes MB where the code has MiB."""
    text = " ".join((repository / "docs" / f"{page}.md").read_text().split())
    found = re.findall(words, text)
    assert len(found) == 1, "the page says it in other words now: change them here, too"
    number = WORDS.get(found[0], found[0]).replace(",", "")
    assert float(number) == pytest.approx(wanted, rel=0.05)
