"""Scenarios: their faults, the time until all is healthy again, and the table."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
from gateway_site import listening
from test_chaos import STATE
from test_drill import calibration
from test_server_run import answered, connected, plain

from layershuffle.cli.swarm import ScenarioFlag as NamedInHelp
from layershuffle.cli.swarm.local_faults import RunningSwarm
from layershuffle.errors import UsageError
from layershuffle.swarm.chaos import ChaosTransport
from layershuffle.swarm.drill import Reply
from layershuffle.swarm.messages import Answer, Visit
from layershuffle.swarm.scenarios import (
    MAY_FAIL,
    Scenario,
    play,
    scenario_json,
    scenario_report,
)
from layershuffle.swarm.server.limits import GatewayLimits

HOSTS = ("a", "b", "c")
SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)


class Mending:
    """A swarm whose broken parts are whole again after so many looks."""

    def __init__(self, looks=3):
        self.looks, self.broken, self.done = looks, frozenset(), []

    def _break(self, *hosts):
        self.broken = frozenset(hosts)

    async def fault(self, host, kind):
        self.done.append((host, kind))
        self._break(*self.broken, host)

    async def pipeline(self):
        self.done.append("pipeline")
        self._break("connections")
        return lambda: self._look() == frozenset()

    async def healthy(self):
        return frozenset(HOSTS) - self._look()

    def _look(self):
        broken = self.broken
        # A liar is not mended but found out: it is broken for good.
        if self.looks and not any("wrong" in str(act) for act in self.done):
            self.looks -= 1
            if not self.looks:
                self.broken = frozenset()
        return broken


async def asked(number):
    await asyncio.sleep(0)
    ended = {5: "failed", 6: "late", 7: "degraded"}.get(number, "answered")
    return Reply(ended, number % 2 == 0, 2, 1.0)


def played(scenario, swarm, ask=asked, **options):
    return asyncio.run(
        play(
            scenario, HOSTS, swarm=swarm, ask=ask, requests=20,
            calibration=calibration(40.0, 50.0), **options,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("scenario", "done"),
    [
        ("all-hosts", [("a", "kill"), ("b", "kill"), ("c", "kill")]),
        ("all-but-one", [("b", "kill"), ("c", "kill")]),
        ("liar", [("c", "wrong")]),
        ("rare-liar", [("c", "wrong-rarely")]),
        ("canary-liar", [("c", "wrong-but-canaries")]),
        ("unread", ["pipeline"]),
    ],
)
def test_each_scenario_breaks_what_it_names_and_sees_it_whole(scenario, done):
    swarm = Mending()
    result = played(scenario, swarm)
    assert swarm.done == done
    assert sorted(result.drill.replies) == list(range(20))
    assert 0 <= result.whole < 5
    # One failed and one was late, which only those scenarios may cost that leave nothing to answer.
    assert result.passed == (scenario in MAY_FAIL)


def test_what_never_heals_is_not_passed():
    result = played("all-hosts", Mending(looks=0), within=0.2)
    assert result.whole is None
    assert not result.passed


def test_the_table():
    results = [played("unread", Mending()), played("all-hosts", Mending(looks=0), within=0.1)]
    heading, *_, first, second = scenario_report(results).splitlines()
    assert heading == "20 requests in each scenario"
    assert first.split()[:5] == ["unread", "5.0", "5.0", "5.0", "52.6"]
    assert "50.0 (" in first
    assert second.endswith("not seen")
    first, second = map(scenario_json, results)
    assert (first["scenario"], first["requests"]) == ("unread", 20)
    assert first["percent"] == {"answered": 85.0, "degraded": 5.0, "failed": 5.0, "late": 5.0}
    assert round(first["accuracy"]["top1"], 1) == 52.6
    assert (second["passed"], second["whole_s"]) == (False, None)


def test_no_row_of_the_table_is_broken():
    """The longest name and the longest time are in one line each."""
    result = replace(played("unread", Mending()), whole=59.9)
    results = [replace(result, scenario=scenario) for scenario in SCENARIOS]
    lines = scenario_report(results).splitlines()[-len(SCENARIOS) :]
    assert [(line.split()[0], line.endswith("59.9 s")) for line in lines] == [
        (scenario, True) for scenario in SCENARIOS
    ]


def test_the_table_says_which_answers_were_not_judged():
    async def foreign(number):
        return replace(await asked(number), unjudged="blocks of another model took part (a: 1)")

    result = played("unread", Mending(), ask=foreign)
    row, note = scenario_report([result]).splitlines()[-2:]
    assert row.split()[4:6] == ["-", "-"]
    # One of the 20 requests failed.
    why = "blocks of another model took part (a: 1)"
    assert note == f"unread: accuracy of 19 answers not judged: {why}"
    assert scenario_json(result)["accuracy_why"] == why


def test_the_names_of_help_are_those_of_the_module():
    assert NamedInHelp == Scenario
    assert len(SCENARIOS) == 6


@pytest.mark.parametrize(
    ("kind", "request_lies", "canary_lies"),
    [("wrong", 400, 400), ("wrong-but-canaries", 400, 0), ("wrong-rarely", 4, 0)],
)
def test_three_kinds_of_liars(kind, request_lies, canary_lies):
    async def honest(visit, state, *, form="fp32"):
        return Answer(state, 1.0, 0.0)

    async def lies(budget):
        transport = ChaosTransport(SimpleNamespace(visit=honest))
        transport.break_host("a", kind)
        visit = Visit("a", 0, 1.0, budget=budget)
        answers = [await transport.visit(visit, STATE) for _ in range(400)]
        return sum(bool((answer.state != STATE).any()) for answer in answers)

    # 4 of 400 in the mean; 1 of 1,000 draws lies beyond 12.
    assert abs(asyncio.run(lies(2.0)) - request_lies) <= (8 if request_lies == 4 else 0)
    assert asyncio.run(lies(None)) == canary_lies


# --- from outside ---------------------------------------------------------------------------------


def running(address):
    return RunningSwarm(SimpleNamespace(), None, address=address)


def test_four_addresses_that_never_read_keep_nobody_else_out():
    """32 connections each, with a hundred requests in every one; another address is served
    meanwhile, and all of them are closed after a few seconds."""
    limits = GatewayLimits(head_ms=500)

    async def large(scope, receive, send):
        """Answers of 300 kB: the kernel takes some, then the server waits for the client."""
        if scope.get("path") != "/v1/swarm":
            return await plain(scope, receive, send)
        head = [(b"content-length", b"300000")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        return await send({"type": "http.response.body", "body": bytes(300_000)})

    async def go():
        async with listening(large, limits) as (listener, port):
            swarm = running(f"http://127.0.0.1:{port}")
            try:
                closed, served = await swarm.pipeline(), 0
                async with asyncio.timeout(40):
                    while not closed():
                        async with connected(port) as other:
                            served += await answered(*other)
            finally:
                swarm.close()
            return served, len(listener.open)

    served, left = asyncio.run(go())
    assert served > 0
    assert left <= 1


def test_unread_answers_are_for_this_machine():
    with pytest.raises(UsageError, match=r"at http://127\.0\.0\.1 alone"):
        asyncio.run(running("https://127.0.0.1:8000").pipeline())
